# SPDX-License-Identifier: Apache-2.0
"""Random schedules against vLLM's real scheduler, KV-cache manager and block pool."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from tests.draws import draw_until_seen, drawn
from tests.scheduler.harness import BLOCK_SIZE, Simulation, vllm_config
from tests.scheduler.schedules import (
    CHUNK,
    OPTIONS,
    PAGE,
    PAGE_BUDGET,
    PREFIXES,
    ROLLING,
    SNAPKV,
    Option,
    Schedule,
    overlaps,
    schedules,
    step_tokens,
)

BUDGET = 12
SHARING = (
    (PREFIXES, ("name", "streaming"), ("num_sink_tokens", 2)),
    (PREFIXES, *SNAPKV, ("num_sink_tokens", 3)),
    (PREFIXES, *SNAPKV, *PAGE),
    (PREFIXES, ("name", "full")),
    (PREFIXES, *SNAPKV, ("evict_every", 7)),
)
"""Beside a budget in slots."""
FRACTIONS = (("prompt", 0.3), ("request", 0.3), ("prompt", 0.2))
"""Budgets that depend on the request."""
PAGES_AT_CAPACITY = BUDGET // BLOCK_SIZE

WAITS = RequestStatus.WAITING_FOR_STREAMING_REQ

totals: Counter[str] = Counter()


@drawn(1000)
@given(
    schedule=schedules(),
    budget=st.sampled_from([BUDGET, 32, 64]),
    options=st.sampled_from(OPTIONS + SHARING + ROLLING),
    fraction=st.sampled_from([None, None, *FRACTIONS]),
    max_batched=st.sampled_from([8, 20, 64]),
    num_pages=st.integers(16, 26),
    overlap=overlaps,
)
def random_schedules(
    schedule: Schedule,
    budget: int,
    options: tuple[tuple[str, object], ...],
    fraction: tuple[str, float] | None,
    max_batched: int,
    num_pages: int,
    overlap: tuple[int, bool],
) -> None:
    """No page is lost, shared or freed twice.

    ``overlap`` is how many steps are in flight, in a pipeline or because scheduling is async.
    """
    size: float = budget
    if ("name", "full") in options:
        size, num_pages = 1.0, max(num_pages, 20)
    elif options in ROLLING:
        size, max_batched = BUDGET, 8
    elif ("evict_every", "page") in options:
        size, num_pages = max(budget, PAGE_BUDGET), max(num_pages, 20)
    elif fraction is not None:
        options, size = (*options, ("budget_basis", fraction[0])), fraction[1]
    # A window of 5 queries in one chunk, whatever the other 7 sequences take.
    max_batched = step_tokens(max_batched, options)
    config = vllm_config(size, max_batched, 8, schedule.policy, overlap[1], options)
    simulation = schedule.play(Simulation, config, schedule.num_blocks(num_pages), overlap[0])
    totals.update(simulation.count)
    totals["evict"] += simulation.pool.num_evictions
    totals["renumber"] += simulation.pool.num_renumbered


def test_no_page_is_lost_shared_or_freed_twice() -> None:
    """Admit, chunk, decode, preempt, resume, abort, finish in any order: each really happened."""
    events = "add chunk decode preempt resume abort finish pack evict reset together renumber page"
    seen = (*events.split(), "pack within a prompt", "restore", "move", "hit")
    draw_until_seen(random_schedules, totals, dict.fromkeys(seen, 50) | {"pack resumed": 20})


@pytest.mark.parametrize("depth", [1, 2])
def test_the_tail_of_a_prompt_is_free_at_the_next_schedule(depth: int) -> None:
    """After the prompt the pages of the survivors are held, and decoding never changes that."""
    config = vllm_config(BUDGET, 64, 8, "fcfs", async_scheduling=depth == 2)
    simulation = Simulation(config, 40, depth)
    request = simulation.add(prompt_len=40, max_tokens=20)
    simulation.step()
    assert simulation.pages_of(request) == 10
    for _ in range(15):
        output = simulation.step()
        assert simulation.pages_of(request) == PAGES_AT_CAPACITY
        assert not any(output.scheduled_cached_reqs.new_block_ids)
    assert simulation.num_free == simulation.num_total - PAGES_AT_CAPACITY


def test_freed_pages_admit_others_in_the_very_next_schedule() -> None:
    """Two long prompts that do not fit together: the second one starts one step after the first."""
    config = vllm_config(BUDGET, 64, 8, "fcfs", async_scheduling=False)
    simulation = Simulation(config, 17, depth=1)
    first, second = simulation.add(40, 20), simulation.add(44, 20)
    simulation.step()
    assert (simulation.pages_of(first), simulation.pages_of(second)) == (10, 0)
    simulation.step()
    assert (simulation.pages_of(first), simulation.pages_of(second)) == (3, 11)
    simulation.drain()
    assert simulation.count["preempt"] == 0


def test_a_short_request_grows_to_its_capacity_and_no_further() -> None:
    """Pages follow resident tokens: one at a time up to C / block_size."""
    config = vllm_config(BUDGET, 64, 8, "fcfs", async_scheduling=False)
    simulation = Simulation(config, 40, depth=1)
    request = simulation.add(prompt_len=2, max_tokens=60)
    held = []
    for _ in range(50):
        simulation.step()
        held.append(simulation.pages_of(request))
    assert held == sorted(held)
    assert held[:3] == [1, 1, 1]
    assert held[-1] == PAGES_AT_CAPACITY


def test_a_request_that_finishes_with_its_prompt_leaves_nothing() -> None:
    """The step that packs is also the request's last."""
    config = vllm_config(BUDGET, 64, 8, "fcfs", async_scheduling=False)
    simulation = Simulation(config, 40, depth=1)
    simulation.add(prompt_len=40, max_tokens=1)
    simulation.step()
    assert simulation.num_free == simulation.num_total
    simulation.add(prompt_len=30, max_tokens=5)
    simulation.drain()
    assert simulation.num_free == simulation.num_total


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("options", "evicted"),
    [
        ((), 0),
        ((PREFIXES, *SNAPKV), 0),
        (PAGE, 0),
        ((("eviction", "pressure"),), 0),
        ((CHUNK,), 24 - (BUDGET - 1)),  # after the first two of its chunks, not after the last
        ((("continuation", True),), 30 - (BUDGET - 1)),  # a next turn begins with what is kept
    ],
    ids=["h2o", "snapkv", "page", "pressure", "chunk", "continuation"],
)
def test_schedule_request_of_one_token_counts_nothing_that_nobody_reads(
    options: tuple[Option, ...], evicted: int, depth: int
) -> None:
    """A beam is a prompt with a token more, again and again, each with max_tokens=1."""
    budget = PAGE_BUDGET // 2 if options == PAGE else BUDGET
    config = vllm_config(budget, 12, 8, "fcfs", depth == 2, options)
    simulation = Simulation(config, 40, depth)
    request = simulation.add(30, 1)
    last = None
    while simulation.scheduler.requests:
        plan = simulation.step().residency_plan.requests.get(request)
        last = plan or last
        evicted -= plan.num_evicted if plan else 0
    assert last is not None and evicted == 0
    assert (last.num_survivors > 0) == (("continuation", True) in options)
    assert simulation.num_free == simulation.num_total


@pytest.mark.parametrize("depth", [1, 2])
def test_a_streaming_input_begins_again_at_each_part(depth: int) -> None:
    """A prompt that is evicted from at its end cannot go on: its text is computed anew."""
    config = vllm_config(BUDGET, 64, 8, "fcfs", async_scheduling=depth == 2)
    simulation = Simulation(config, 40, depth)
    request = simulation.add(30, 6, resumable=True)
    for _ in range(12):
        simulation.step()
    simulation.add(10, 6, resumable=True, request_id=request)
    starts = []
    for _ in range(12):
        plan = simulation.step().residency_plan.requests.get(request)
        starts += [plan.logical_start] if plan else []
    assert starts[0] == 0
    assert starts[1] >= 40
    simulation.abort([request])
    assert simulation.num_free == simulation.num_total


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "options",
    [(CHUNK,), ROLLING[0], (CHUNK, ("evict_every", "page"))],
    ids=["chunk", "roll", "page"],
)
@pytest.mark.parametrize("generated", [1, 7])
def test_a_streaming_input_goes_on(depth: int, options: Any, generated: int) -> None:
    """Where chunks are packed: each part follows what is resident, however it was left."""
    config = vllm_config(BUDGET, 8, 8, "fcfs", depth == 2, options)
    simulation = Simulation(config, 40, depth)
    session, other = simulation.add(30, generated, resumable=True), simulation.add(5, 60)
    starts, ends = [], [0]
    for length in (10, 1, 4):
        while simulation.scheduler.requests[session].status != WAITS:
            plan = simulation.step().residency_plan.requests.get(session)
            starts += [plan.logical_start] if plan else []
            ends += [plan.logical_end] if plan else []
        assert starts == ends[:-1]
        held = simulation.scheduler.ledger.states[session].resident_len
        if ("evict_every", "page") in options:
            assert BUDGET - BLOCK_SIZE <= held < BUDGET
        else:
            assert held == min(BUDGET - (generated == 1), ends[-1])
        simulation.add(length, generated, resumable=True, request_id=session)
    simulation.abort([session, other])
    assert simulation.num_free == simulation.num_total


def test_a_streaming_input_with_a_token_too_many_begins_again() -> None:
    """A token that came after the one that stops, and was computed before that was known."""
    config = vllm_config(BUDGET, 64, 8, "fcfs", True, (CHUNK,))
    simulation = Simulation(config, 40, depth=2)
    simulation.stop_rate = 1.0
    session = simulation.add(30, 9, resumable=True)
    for _ in range(4):
        simulation.step()
    assert simulation.scheduler.requests[session].status == WAITS
    assert simulation.scheduler.ledger.states[session].logical_len == 31
    simulation.add(10, 9, resumable=True, request_id=session)
    assert simulation.step().residency_plan.requests[session].logical_start == 0
    simulation.abort([session])


@pytest.mark.parametrize(
    ("options", "pages"),
    [
        ((CHUNK, ("merge", 0.9)), 40),  # a chunk attends to a merged token as to one
        ((CHUNK,), -(-(BUDGET - 1 + 9) // BLOCK_SIZE)),  # of a chunk and the survivors, no more
        ((CHUNK, ("positions", BUDGET - 1 + 9)), 40),
    ],
    ids=["merged", "no pages", "no positions"],
)
def test_a_streaming_input_that_finds_no_room_begins_again(options: Any, pages: int) -> None:
    """After decode it holds more tokens than survive a chunk of its prompt."""
    config = vllm_config(BUDGET, 9, 8, "fcfs", False, options)
    simulation = Simulation(config, 1 + pages, depth=1)
    session = simulation.add(30, 7, resumable=True)
    while simulation.scheduler.requests[session].status != WAITS:
        simulation.step()
    assert simulation.scheduler.ledger.states[session].resident_len == BUDGET
    simulation.add(20, 7, resumable=True, request_id=session)
    assert simulation.step().residency_plan.requests[session].logical_start == 0
    while simulation.scheduler.requests[session].status != WAITS:
        simulation.step()
    simulation.abort([session])
    assert simulation.num_free == simulation.num_total


def test_a_streaming_input_fills_a_budget_of_all() -> None:
    """Where requests enter, a prompt is shorter than the longest sequence; its parts are not."""
    config = vllm_config(1.0, 64, 8, "fcfs", async_scheduling=False)
    simulation = Simulation(config, 40, depth=1)
    request = simulation.add(30, 6, resumable=True)
    for _ in range(8):
        simulation.step()
    # All of the first part but the last token, which was not computed.
    simulation.add(63 - 35, 6, resumable=True, request_id=request)
    plan = simulation.step().residency_plan.requests[request]
    assert (plan.logical_end, plan.num_survivors) == (63, 0)
    simulation.abort([request])
    assert simulation.num_free == simulation.num_total


@pytest.mark.parametrize("stages", [3, 4, 5])
def test_tokens_behind_the_last_fit(stages: int) -> None:
    """With many steps in flight vLLM computes some that it throws away."""
    config = vllm_config(16, 64, 8, "fcfs", async_scheduling=True)
    config.parallel_config.pipeline_parallel_size = stages
    simulation = Simulation(config, 40, depth=config.max_concurrent_batches)
    simulation.add(10, 6)
    simulation.drain()
    assert simulation.num_free == simulation.num_total


def test_lengths_outlive_nothing() -> None:
    """Abort in the middle of a prompt, while waiting, and after eviction."""
    config = vllm_config(BUDGET, 8, 8, "fcfs", async_scheduling=False)
    simulation = Simulation(config, 40, depth=1)
    in_prompt, waiting = simulation.add(40, 10), simulation.add(40, 10)
    simulation.step()
    simulation.abort([waiting, in_prompt])
    assert simulation.num_free == simulation.num_total
    full = simulation.add(20, 30)
    for _ in range(10):
        simulation.step()
    simulation.abort([full])
    assert simulation.num_free == simulation.num_total


def test_a_prompt_of_three_times_the_pool() -> None:
    """Packed after each chunk, a request holds C - 1 tokens and a chunk at the most."""
    config = vllm_config(BUDGET, 8, 8, "fcfs", False, (CHUNK,))
    num_pages = -(-(BUDGET - 1 + 9) // BLOCK_SIZE)
    simulation = Simulation(config, 1 + num_pages, depth=1)
    request = simulation.add(prompt_len=60, max_tokens=4)
    assert 3 * num_pages * BLOCK_SIZE == 60
    held = []
    while not simulation.count["finish"]:
        simulation.step()
        held.append(simulation.pages_of(request))
    assert held[:8] == [2, 4] + [num_pages] * 6
    assert held[8:-1] == [PAGES_AT_CAPACITY] * len(held[8:-1])
    assert simulation.count["preempt"] == 0
    assert simulation.num_free == simulation.num_total


def test_free_after_a_short_last_chunk_returns_pages_of_earlier_ones() -> None:
    """One token ends the prompt and fills no page: nothing is evicted, and the pages still go."""
    simulation = Simulation(vllm_config(BUDGET, 8, 8, "fcfs", False, (CHUNK, *PAGE)), 40, depth=1)
    simulation.add(2, 1)
    request = simulation.add(6 + 3 * 8 + 1, 30)
    plans = [simulation.step().residency_plan.requests[request] for _ in range(5)]
    last = plans[-1]
    assert (last.num_new, last.num_survivors, last.resident_end) == (1, 0, 11)
    assert simulation.pages_of(request) > PAGES_AT_CAPACITY
    for _ in range(20):
        simulation.step()
        assert simulation.pages_of(request) == PAGES_AT_CAPACITY


@pytest.mark.parametrize(
    ("options", "most"), [((), 64), ((CHUNK,), 19), ((CHUNK, ("evict_every", "page")), 19)]
)
def test_the_memory_that_one_longest_request_needs(options: tuple, most: int) -> None:
    """vLLM refuses to start with less: a whole prompt, or what is left of it and one chunk."""
    config = vllm_config(BUDGET, 8, 8, "fcfs", False, options)
    spec = Simulation(config, 40, depth=1).scheduler.block_manager.kv_cache_spec
    pages = -(-most // BLOCK_SIZE)
    assert spec.max_memory_usage_bytes(config) == pages * spec.page_size_bytes


@pytest.mark.parametrize(
    ("basis", "prompt_len", "max_tokens", "options", "capacity"),
    [
        ("prompt", 40, 20, (), 20),
        ("request", 20, 20, (), 20),
        ("prompt", 3, 20, (), 4),
        ("prompt", 4, 50, (), 4),
        ("prompt", 4, 50, PAGE, 8),  # a page that stays, and one that is filled
    ],
)
def test_a_budget_of_the_request_itself(
    basis: str, prompt_len: int, max_tokens: int, options: tuple[Option, ...], capacity: int
) -> None:
    """Half of its prompt, or of its prompt and what may follow; a resumed request keeps it."""
    config = vllm_config(0.5, 64, 8, "fcfs", False, (("budget_basis", basis), *options))
    simulation = Simulation(config, 40, depth=1)
    request = simulation.add(prompt_len, max_tokens)
    for _ in range(12):
        simulation.step()
    states = simulation.scheduler.ledger.states
    assert states[request].budget.capacity == capacity
    assert simulation.pages_of(request) <= capacity // BLOCK_SIZE
    simulation.reset()
    for _ in range(3):
        simulation.step()
    assert states[request].budget.capacity == capacity
    assert states[request].prompt_end > prompt_len


def test_what_was_published_for_a_step_that_never_ran() -> None:
    """A request that is preempted in the schedule that would have computed its pages."""
    config = vllm_config(BUDGET, 64, 8, "priority", False, SHARING[0])
    simulation = Simulation(config, 40, depth=1)
    request = simulation.scheduler.requests[simulation.add(prompt_len=20, max_tokens=5)]
    pages = simulation.scheduler.kv_cache_manager
    pages.new_step_starts()
    assert pages.allocate_slots(request, 20) is not None
    assert pages.get_computed_blocks(request)[1] == 16
    pages.free(request)
    assert pages.get_computed_blocks(request)[1] == 0
    simulation.drain()
    assert simulation.num_free == simulation.num_total
