# SPDX-License-Identifier: Apache-2.0
"""``eviction=pressure``: which requests fall back to their budget, when, and their pages."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from tests.draws import draw_until_seen, drawn
from tests.scheduler.harness import BLOCK_SIZE, Simulation, vllm_config
from tests.scheduler.observed import Observed
from tests.scheduler.schedules import (
    H2O2,
    PAGE,
    PAGE_BUDGET,
    SNAPKV,
    Schedule,
    overlaps,
    schedules,
)
from vllm_h2o.policy import Budget
from vllm_h2o.scheduler.pressure import MAX_PACKS, Forecast, Relief, most_taken, relieve
from vllm_h2o.scheduler.state import RequestState

BUDGET = 12
PRESSURE = ("eviction", "pressure")
OPTIONS: tuple[tuple[tuple[str, object], ...], ...] = (
    (PRESSURE,),
    (PRESSURE, *PAGE),
    (PRESSURE, *SNAPKV, ("num_sink_tokens", 3)),
    (PRESSURE, *H2O2),
    (PRESSURE, *H2O2, *PAGE),
    (PRESSURE, ("name", "streaming"), ("num_sink_tokens", 2)),
    (PRESSURE, ("evict_every", 6)),
)
totals: Counter[str] = Counter()


def engine(
    pages: int, *, depth: int = 1, policy: str = "fcfs", max_batched: int = 64, **options: Any
) -> Simulation:
    """A simulation of ``pages`` pages under pressure."""
    own = (PRESSURE, *options.items())
    config = vllm_config(BUDGET, max_batched, 12, policy, depth == 2, own)
    return Simulation(config, 1 + pages, depth)


@drawn(1000)
@given(
    schedule=schedules(),
    budget=st.sampled_from([BUDGET, BUDGET, 32]),
    options=st.sampled_from(OPTIONS),
    max_batched=st.sampled_from([12, 20, 64]),
    num_pages=st.integers(16, 40),
    overlap=overlaps,
)
def random_schedules(
    schedule: Schedule,
    budget: int,
    options: tuple[tuple[str, object], ...],
    max_batched: int,
    num_pages: int,
    overlap: tuple[int, bool],
) -> None:
    """No page is lost, shared or freed twice, and every number is right, packed at any time."""
    if ("evict_every", "page") in options:
        budget = PAGE_BUDGET
    config = vllm_config(budget, max_batched, 8, schedule.policy, overlap[1], options)
    simulation = schedule.play(Observed, config, schedule.num_blocks(num_pages), overlap[0])
    assert not simulation.scheduler.ledger.falling_back
    totals.update(simulation.count)
    totals.update(simulation.reported)


def test_no_page_is_lost_shared_or_freed_twice() -> None:
    """Through everything that may happen to a request, and each of it did."""
    events = "add chunk decode preempt resume abort finish pack reset page restore together"
    seen = (*events.split(), "pressure_packs", "pressure_evicted_tokens")
    draw_until_seen(random_schedules, totals, dict.fromkeys(seen, 50) | {"pack resumed": 20})


@pytest.mark.parametrize("depth", [1, 2])
def test_nothing_goes_while_there_is_room(depth: int) -> None:
    """A pool that holds all sequences whole: every token stays."""
    simulation = engine(4 * 15, depth=depth)
    requests = [simulation.add(20, 40) for _ in range(4)]
    most = 0
    while simulation.scheduler.has_unfinished_requests():
        simulation.step()
        most = max(most, *(simulation.pages_of(request) for request in requests))
    assert most == 15
    assert simulation.pool.num_gone == 0
    assert simulation.count["preempt"] == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("lengths", [(20, 40), (2, 60), (50, 10)])
def test_as_many_run_as_always(lengths: tuple[int, int], depth: int) -> None:
    """In a pool of twelve budgets twelve run at once, and none of them is thrown out."""
    running, ends = {}, {}
    for eviction in ("prompt_end", "pressure"):
        config = vllm_config(BUDGET, 64, 12, "fcfs", depth == 2, (("eviction", eviction),))
        simulation = Simulation(config, 1 + 12 * BUDGET // BLOCK_SIZE, depth)
        for _ in range(24):
            simulation.add(*lengths)
        running[eviction] = 0
        for step in range(1000):
            if not simulation.scheduler.has_unfinished_requests():
                break
            simulation.step()
            running[eviction] = max(running[eviction], len(simulation.scheduler.running))
            ends[eviction] = step
        assert simulation.count["preempt"] == 0
    assert running["pressure"] == running["prompt_end"]
    assert ends["pressure"] <= 1.1 * ends["prompt_end"]


def test_who_fell_back_stays_at_capacity() -> None:
    """Its pages come back when the next step starts, and it takes none again."""
    simulation = engine(20)
    first = simulation.add(20, 40)
    for _ in range(6):
        simulation.step()
    assert simulation.pages_of(first) == 7
    simulation.add(55, 5)
    simulation.step()
    assert simulation.pages_of(first) == 7
    assert simulation.scheduler.ledger.stats.pressure_packs == 1
    for _ in range(30):
        output = simulation.step()
        cached = output.scheduled_cached_reqs
        assert not dict(zip(cached.req_ids, cached.new_block_ids, strict=True)).get(first)
        assert simulation.pages_of(first) == BUDGET // BLOCK_SIZE
    simulation.drain()
    assert simulation.num_free == simulation.num_total


def test_a_prompt_that_ends_while_memory_is_short_is_packed_at_once() -> None:
    """Nobody else holds more than its budget, and a third one waits."""
    simulation = engine(16)
    first, _ = simulation.add(50, 10), simulation.add(50, 10)
    simulation.step()
    simulation.step()
    assert simulation.pages_of(first) == BUDGET // BLOCK_SIZE
    assert simulation.scheduler.ledger.stats.pressure_packs == 0
    assert simulation.scheduler.ledger.stats.packs == 1


def test_budgets_of_their_own() -> None:
    """Each falls back to its own."""
    simulation = engine(25)
    requests = [simulation.add(24, 40) for _ in range(2)]
    extra = {"kv_budget": 24}
    simulation.scheduler.requests[requests[1]].sampling_params.extra_args = extra
    for _ in range(6):
        simulation.step()
    assert [simulation.pages_of(request) for request in requests] == [8, 8]
    simulation.add(60, 2)
    for _ in range(3):
        simulation.step()
    assert [simulation.pages_of(request) for request in requests] == [3, 6]


def test_the_lowest_priority_falls_back_first() -> None:
    """Whoever came first."""
    simulation = engine(28, policy="priority")
    low, high = simulation.add(28, 40, priority=5), simulation.add(24, 40, priority=1)
    for _ in range(4):
        simulation.step()
    simulation.add(50, 2, priority=3)
    for _ in range(2):
        simulation.step()
    states = simulation.scheduler.ledger.states
    assert (states[low].grows, states[high].grows) == (False, True)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_abort_around_a_pack(steps: int) -> None:
    """Before its step comes, when it has been scheduled, and when its pages are back."""
    simulation = engine(20, depth=2)
    first = simulation.add(20, 40)
    for _ in range(6):
        simulation.step()
    simulation.scheduler.ledger.falling_back.add(first)
    for _ in range(steps):
        simulation.step()
    simulation.abort([first])
    assert not simulation.scheduler.ledger.falling_back
    simulation.add(50, 5)
    simulation.drain()
    assert simulation.num_free == simulation.num_total


def test_who_is_thrown_out_begins_again_and_grows() -> None:
    """It has lost its pages, and keeps every token again."""
    simulation = engine(20)
    first = simulation.add(20, 40)
    for _ in range(6):
        simulation.step()
    simulation.scheduler.ledger.falling_back.add(first)
    simulation.step()
    assert not simulation.scheduler.ledger.states[first].grows
    simulation.reset()
    simulation.step()
    assert simulation.scheduler.ledger.states[first].grows
    simulation.drain()


def forecast(
    name: str, takes: int = 0, saves: int = 0, loses: int = 1, priority: int = 0
) -> Forecast:
    """A running request's."""
    return Forecast(request_id=name, takes=takes, saves=saves, loses=loses, priority=priority)


@pytest.mark.parametrize(
    ("free", "forecasts", "waiting", "spare", "expected"),
    [
        (3, [forecast("a", 1, 4), forecast("b", 2, 4)], [], 9, Relief()),
        (2, [forecast("a", 1, 4), forecast("b", 2, 4)], [], 0, Relief(("b",))),
        (0, [forecast("a", 1, 4, 9), forecast("b", 0, 4, 20)], [], 0, Relief(("a",))),
        (0, [forecast("a", 1, 4, 9), forecast("b", 0, 9, 20)], [], 0, Relief(("b",))),
        (0, [forecast("a", 1, 4), forecast("b", 0, 1, 99, priority=1)], [], 0, Relief(("b",))),
        (0, [forecast("a", 4, 4), forecast("b", 0, 1, 99, priority=1)], [], 0, Relief(("b", "a"))),
        (0, [forecast("a", 1), forecast("b", 0, 0)], [], 0, Relief((), is_short=True)),
        (5, [forecast("a", 1, 4, 9), forecast("b", 0, 9, 20)], [4], 0, Relief()),
        (5, [forecast("a", 1, 4, 9), forecast("b", 0, 9, 20)], [4, 4], 0, Relief(("b",))),
        (5, [forecast("a", 1, 4, 9), forecast("b", 0, 9, 20)], [4, 4], 8, Relief(("b", "a"))),
        (5, [forecast("a", 1, 4), forecast("b", 0, 3)], [4, 99], 0, Relief((), is_short=True)),
        (5, [forecast("a", 1, 4), forecast("b", 0, 3)], [99, 5], 0, Relief((), is_short=True)),
        (1, [forecast("a", 2, 1, 2), forecast("b", 1, 2, 4), forecast("c", 0, 8, 99)], [], 4,
         Relief(("c",))),
    ],
)  # fmt: skip
def test_as_few_as_are_enough(
    free: int, forecasts: list[Forecast], waiting: list[int], spare: int, expected: Relief
) -> None:
    """Priority, then fewest tokens for a page, then the latest; none for a hopeless request."""
    assert relieve(free, forecasts, waiting, spare) == expected


def test_who_falls_back_already_is_not_asked_again() -> None:
    """Its pages come back with the step after its own."""
    coming = Forecast(request_id="a", takes=1, gives=5)
    assert relieve(0, [coming, forecast("b", 4, 4)], [], 0) == Relief()
    assert relieve(0, [coming, forecast("b", 5, 4)], [], 0) == Relief(("b",))


def test_a_limit_for_those_that_wait_and_none_for_those_that_run() -> None:
    """Packing stays a small part of a step; throwing a sequence out would cost more."""
    crowd = [forecast(str(i), 0, 1) for i in range(3 * MAX_PACKS)]
    assert len(relieve(0, crowd, [2 * MAX_PACKS], 0).falling_back) == MAX_PACKS
    running = [*crowd, forecast("r", 2 * MAX_PACKS)]
    assert len(relieve(0, running, [], 0).falling_back) == 2 * MAX_PACKS


def state(resident_len: int, *, prompt_end: int = 4, **others: Any) -> RequestState:
    """A request with a budget of 12 slots that grows."""
    lengths = {"logical_len": resident_len, "resident_len": resident_len, "held_len": resident_len}
    fixed = {"prompt_end": prompt_end, "budget": Budget(12, 5, 6, 0), "grows": True}
    return RequestState(**{**lengths, **fixed, **others})


@pytest.mark.parametrize(
    ("held", "falling_back", "takes", "gives", "saves", "loses"),
    [
        (state(5), False, 0, 0, 0, 0),  # below its budget
        (state(7), False, 1, 0, 0, 0),
        (state(11), False, 1, 0, 1, 1),  # the last moment at which nothing moves
        (state(12), False, 1, 0, 1, 2),
        (state(21), False, 0, 0, 3, 11),
        (state(23), False, 1, 0, 4, 13),
        (state(24), True, 1, 4, 0, 0),  # its step is still to come
        (state(11, grows=False), False, 0, 0, 0, 0),
        (state(12, grows=False), False, 0, 0, 0, 0),
        (state(8, prompt_end=20), False, 4, 0, 0, 0),  # 12 tokens of its prompt, and the next
        (state(22, max_len=24), False, 0, 0, 3, 12),
        (state(23, max_len=24), False, 0, 0, 0, 0),  # it ends anyway
        (state(23, max_len=25), False, 1, 0, 4, 13),
    ],
)
def test_what_a_request_takes_and_could_give(
    held: RequestState, falling_back: bool, takes: int, gives: int, saves: int, loses: int
) -> None:
    """Its next two tokens, in pages of four."""
    found = Forecast.of("r", held, 4, falling_back)
    assert (found.takes, found.gives, found.saves) == (takes, gives, saves)
    assert not saves or found.loses == loses
    assert found.takes <= most_taken([held], 4)


def test_a_session_s_next_part_is_waited_for() -> None:
    """Others fall back for it, as for any request that has no room."""
    simulation = engine(12)
    session, other = simulation.add(8, 1, resumable=True), simulation.add(8, 60)
    while simulation.scheduler.requests[session].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        simulation.step()
    while simulation.num_free > 1:
        simulation.step()
    assert not simulation.count["fall back"]
    simulation.add(12, 4, resumable=True, request_id=session)
    for _ in range(3):
        simulation.step()
    assert simulation.count["fall back"] == 1
    assert session in simulation.scheduler.ledger.states
    simulation.abort([session, other])
    assert simulation.num_free == simulation.num_total
