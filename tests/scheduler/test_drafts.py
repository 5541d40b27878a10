# SPDX-License-Identifier: Apache-2.0
"""Drafts that are accepted and rejected at random: lengths, pages, and when tokens are evicted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import draw_until_seen, drawn
from tests.scheduler.harness import Simulation, vllm_config
from tests.scheduler.observed import Observed
from tests.scheduler.schedules import (
    H2O2,
    PAGE_BUDGET,
    PREFIXES,
    SNAPKV,
    Option,
    Schedule,
    schedules,
)
from vllm_h2o.errors import IntegrityError
from vllm_h2o.policy import Budget
from vllm_h2o.scheduler.ledger import Ledger
from vllm_h2o.scheduler.rules import Rules
from vllm_h2o.scheduler.state import RequestInfo

BUDGET = 12
PAGE: Option = ("evict_every", "page")
OPTIONS: tuple[tuple[Option, ...], ...] = (
    (("evict_every", 6),),
    (("evict_every", 9), ("eviction", "chunk"), ("num_sink_tokens", 6)),
    (("evict_every", 6), *SNAPKV),
    (("evict_every", 6), *SNAPKV, PREFIXES),
    (("evict_every", 7), *H2O2),
    (PAGE, *H2O2, ("recent_ratio", 0.2)),
    (("evict_every", 7), ("name", "streaming"), ("num_sink_tokens", 2), PREFIXES),
    (("name", "full"),),
)
totals: Counter[str] = Counter()


@drawn(500)
@given(
    schedule=schedules(),
    budget=st.sampled_from([BUDGET, BUDGET, 32, 64]),
    options=st.sampled_from(OPTIONS),
    max_batched=st.sampled_from([40, 64]),
    num_pages=st.integers(17, 26),
)
def random_schedules(
    schedule: Schedule,
    budget: int,
    options: tuple[Option, ...],
    max_batched: int,
    num_pages: int,
) -> None:
    """No page is lost, shared or freed twice, and every number is right."""
    size: float = budget
    if ("name", "full") in options:
        size, num_pages = 1.0, max(num_pages, 20)
    elif PAGE in options:  # drafts have to fit into a page
        size, schedule = PAGE_BUDGET, replace(schedule, block_size=8)
    config = vllm_config(size, max_batched, 8, schedule.policy, False, (*options, ("drafts", 4)))
    kind = Simulation if PREFIXES in options else Observed
    simulation = schedule.play(kind, config, schedule.num_blocks(num_pages))
    totals.update(simulation.count)


def test_no_page_is_lost_shared_or_freed_twice() -> None:
    """Preempted, aborted and ended with drafts on their way, and each of it did happen."""
    events = "add chunk decode preempt resume abort finish pack reset together page restore"
    seen = (*events.split(), "accepted", "rejected")
    draw_until_seen(random_schedules, totals, dict.fromkeys(seen, 50))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("every", [7, "page"])
def test_drafts_evict_and_restore_after_as_many_tokens_as_without(
    every: int | str, seed: int
) -> None:
    """Whatever was accepted, and never in a step with drafts."""
    found = []
    for drafts in (0, 5):
        own = (*H2O2, ("evict_every", every), ("drafts", drafts))
        config = vllm_config(24, 64, 4, "fcfs", False, own)
        simulation = Simulation(config, 40, 1, seed, block_size=8)
        for prompt_len in (5, 11, 12, 30):
            simulation.add(prompt_len, 34)
        packs, restored = set(), set()
        while simulation.scheduler.has_unfinished_requests():
            for name, plan in simulation.step().residency_plan.requests.items():
                if plan.evicts_together:
                    assert plan.num_new == 1
                    packs.add((name, plan.logical_end))
                if plan.restored_end:
                    assert plan.num_new == 1
                    restored.add((name, plan.logical_end))
        found.append((packs, restored))
    assert found[0] == found[1]
    assert len(packs) >= 8 and len(restored) == 4
    assert simulation.count["accepted"] > 5 and simulation.count["rejected"] > 5


def test_what_is_reported_has_no_rejected_drafts() -> None:
    """When vLLM asks for statistics, in the middle of its update, lengths are vLLM's own."""
    options = (("evict_every", 7), ("drafts", 4))
    simulation = Simulation(vllm_config(BUDGET, 64, 4, "fcfs", False, options), 40, 1, 0)
    scheduler, num_asked = simulation.scheduler, 0
    make_stats = scheduler.make_stats

    def asked(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_asked
        stats, num_asked = make_stats(*args, **kwargs), num_asked + 1
        for request_id, state in scheduler.ledger.states.items():
            assert state.logical_len == scheduler.requests[request_id].num_computed_tokens
        return stats

    scheduler.make_stats = asked
    simulation.add(12, 40)
    simulation.drain()
    assert num_asked > 10 and simulation.count["rejected"] > 5


def test_room_for_drafts() -> None:
    """None past the last slot but one; of a request that fits, none past its last slot."""
    ledger = Ledger(Budget(21, 7, 8, 0, 6), 4, Rules(num_drafts=4))
    for max_len, room in ((99, {14: 5, 16: 4, 18: 2, 19: 1, 20: 1}), (21, {16: 5, 18: 3, 20: 1})):
        for length, most in room.items():
            info = RequestInfo(min(length, 15), max_len)
            start = 0
            for end in (min(length, 15), *range(16, length + 1)):
                ledger.commit("r", ledger.preview("r", start, end, info), info)
                ledger.take_step({"r": end - start})
                start = end
            assert ledger.align_chunk("r", length, 9, 0) == most
            assert ledger.preview("r", length, length + most, info).num_new == most
            with pytest.raises(IntegrityError, match="more drafts than there is room for"):
                ledger.preview("r", length, length + most + 1, info)
            ledger.close("r")
    assert ledger.align_chunk("new", 0, 9, 5) == 5  # no draft follows a prompt's last token


@pytest.mark.parametrize("length", [10, 13, 14, 15])
def test_max_new_before_a_lifetime_ends_leaves_its_last_token_alone(length: int) -> None:
    """With token 15, five after the prompt, scores are restored: as without drafts."""
    ledger, info = (
        Ledger(Budget(40, 7, 8, 0, 25), 4, Rules(num_drafts=4, lifetime=5)),
        RequestInfo(10),
    )
    for start, end in ((0, 10), *((n, n + 1) for n in range(10, length))):
        ledger.commit("r", ledger.preview("r", start, end, info), info)
        ledger.take_step({"r": end - start})
    most = {10: 4, 13: 1, 14: 1, 15: 5}[length]
    assert ledger.align_chunk("r", length, 9, 10) == most
    assert ledger.preview("r", length, length + most, info).restored_end == (length == 14) * 10


def test_rejected_drafts_leave_their_slots() -> None:
    """Lengths are those of the tokens that were accepted, at least one; pages stay."""
    ledger, info = Ledger(Budget(21, 7, 8, 0, 6), 4, Rules(num_drafts=4)), RequestInfo(10)
    for start, end in ((0, 10), (10, 15)):
        ledger.commit("r", ledger.preview("r", start, end, info), info)
        ledger.take_step({"r": end - start})
    for wrong in (10, 16):
        with pytest.raises(IntegrityError, match="a step of 5 that ends at 15"):
            ledger.settle("r", wrong)
    ledger.settle("r", 12)
    held = ledger.states["r"]
    assert (held.logical_len, held.resident_len, held.held_len, held.num_unscored) == (
        12,
        12,
        15,
        2,
    )
    plan = ledger.preview("r", 12, 13, info)
    assert (plan.resident_start, plan.num_unscored, plan.has_drafts) == (12, 2, False)
    ledger.commit("r", plan, info)
    with pytest.raises(IntegrityError, match="a step of 0"):
        ledger.settle("r", 13)
