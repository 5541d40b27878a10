# SPDX-License-Identifier: Apache-2.0
"""Lengths and plans, without vLLM."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_h2o.errors import IntegrityError
from vllm_h2o.policy import Budget
from vllm_h2o.scheduler.ledger import Ledger
from vllm_h2o.scheduler.rules import Rules
from vllm_h2o.scheduler.state import Left, RequestInfo
from vllm_h2o.wire import RequestPlan

BUDGET = Budget(capacity=16, num_heavy=7, num_recent=8, num_sinks=0)


def run(ledger: Ledger, start: int, end: int, prompt_len: int) -> RequestPlan:
    """Compute tokens [start, end) of request "r" in a step of its own."""
    plan = ledger.preview("r", start, end, RequestInfo(prompt_len))
    ledger.commit("r", plan, RequestInfo(prompt_len))
    ledger.take_step({"r": end - start})
    return plan


@given(chunks=st.lists(st.integers(1, 30), min_size=1, max_size=6), decodes=st.integers(0, 40))
def test_resident_length_follows_the_definition(chunks: list[int], decodes: int) -> None:
    """All of the prompt, then C - 1, then at most C; logical length counts every token."""
    ledger = Ledger(BUDGET, block_size=4)
    prompt_len, done = sum(chunks), 0
    for chunk in chunks:
        plan = run(ledger, done, done + chunk, prompt_len)
        done += chunk
        assert plan.in_prompt
        assert plan.attended_len == done
        assert plan.num_survivors == (15 if done == prompt_len and done > 15 else 0)
    resident = min(prompt_len, 15)
    assert ledger.states["r"].resident_len == resident
    for _ in range(decodes):
        plan = run(ledger, done, done + 1, prompt_len)
        done += 1
        assert plan.overwrites == (resident == 16)
        resident = min(resident + 1, 16)
        assert plan.attended_len == plan.resident_end == resident
        assert ledger.states["r"].logical_len == done


@pytest.mark.parametrize("prompt_len", [3, 15, 17, 40])
@pytest.mark.parametrize("evict_every", [2, 5, 30])
def test_several_tokens_at_a_time(evict_every: int, prompt_len: int) -> None:
    """C - 1 of the prompt; then up to C - 1 + s, of which s go; its pages never change again."""
    budget = Budget(15 + evict_every, 7, 8, 0, evict_every)
    ledger = Ledger(budget, block_size=4)
    run(ledger, 0, prompt_len, prompt_len)
    resident, num_evicted = min(prompt_len, 15), max(prompt_len - 15, 0)
    assert ledger.states["r"].resident_len == resident
    for done in range(prompt_len, 120):
        plan = run(ledger, done, done + 1, prompt_len)
        assert not plan.overwrites and not plan.selects and not plan.falls_back
        assert plan.attended_len == resident + 1
        packs = resident + 1 == 15 + evict_every
        assert (plan.evicts_together, plan.num_survivors) == (packs, 15 if packs else 0)
        assert plan.num_evicted == (evict_every if packs else 0)
        resident = 15 if packs else resident + 1
        num_evicted += plan.num_evicted
        held = ledger.states["r"]
        assert (held.resident_len, held.logical_len) == (resident, done + 1)
        assert held.is_full is (num_evicted > 0)
        if num_evicted:
            assert ledger.num_row_blocks(plan) <= ledger.num_pages(15 + evict_every)
            assert held.held_len == 15 + evict_every


@pytest.mark.parametrize("prompt_len", [3, 11, 12, 16, 17, 40])
@pytest.mark.parametrize("every", [4, 8])
def test_preview_by_page_evicts_whole_pages(every: int, prompt_len: int) -> None:
    """The page that is not full survives a prompt; in decode none is, when all slots are taken."""
    budget = Budget(8 + every, 4, 4, 0, every, unit=4)
    ledger = Ledger(budget, block_size=4)
    plan = run(ledger, 0, prompt_len, prompt_len)
    resident = min(prompt_len, 8 + prompt_len % 4)
    assert plan.num_survivors == (resident if resident < prompt_len else 0)
    assert plan.num_evicted % 4 == 0
    assert ledger.states["r"].resident_len == resident
    for done in range(prompt_len, 70):
        plan = run(ledger, done, done + 1, prompt_len)
        assert plan.attended_len == resident + 1 and not plan.overwrites and not plan.selects
        resident = 8 if resident + 1 == budget.capacity else resident + 1
        assert plan.num_survivors == (8 if resident == 8 < plan.attended_len else 0)
        assert ledger.states["r"].resident_len == resident
        assert ledger.num_row_blocks(plan) <= ledger.num_pages(max(budget.capacity, done + 1))
    assert ledger.states["r"].held_len == budget.capacity


def test_several_tokens_at_a_time_of_a_request_that_fits() -> None:
    """It fills all slots, the ones for new tokens too, and loses nothing."""
    ledger, info = Ledger(Budget(20, 7, 8, 0, 5), 4), RequestInfo(9, 20)
    for start, end in ((0, 9), *((n, n + 1) for n in range(9, 20))):
        plan = ledger.preview("r", start, end, info)
        ledger.commit("r", plan, info)
        ledger.take_step({"r": end - start})
        assert plan.fits and not plan.num_survivors
    with pytest.raises(IntegrityError, match="does not fit into 20 slots"):
        ledger.preview("r", 20, 21, info)


def test_a_prompt_chunk_of_one_token_at_capacity_overwrites_nothing() -> None:
    """Only tokens past the prompt take a victim's slot."""
    ledger = Ledger(BUDGET, block_size=4)
    run(ledger, 0, 16, prompt_len=20)
    plan = run(ledger, 16, 17, prompt_len=20)
    assert not plan.overwrites
    assert plan.attended_len == 17


def test_a_request_that_fits_is_not_scored() -> None:
    """Nothing of it is ever evicted; its row of the block table counts as much as what it asks."""
    short_row = Ledger(BUDGET, 4, Rules(max_blocks_per_request=4))
    for ledger, max_len in ((Ledger(BUDGET, 4), 16), (short_row, 999)):
        assert ledger.preview("r", 0, 9, RequestInfo(9, max_len)).fits
    # A prompt of 16 tokens leaves no slot for the next one: all the more where the row ends there.
    assert short_row.preview("r", 0, 16, RequestInfo(16, 99)).num_survivors == 15
    for info in (RequestInfo(9, 17), RequestInfo(9)):
        assert not Ledger(BUDGET, 4).preview("r", 0, 9, info).fits


@pytest.mark.parametrize("prompt_len", [2, 12, 20])
def test_a_windows_lifetime_ends_once(prompt_len: int) -> None:
    """With its fifth token after the prompt; never where nothing is scored."""
    ledger = Ledger(BUDGET, 4, Rules(lifetime=5))
    run(ledger, 0, prompt_len, prompt_len)
    plans = [run(ledger, n, n + 1, prompt_len) for n in range(prompt_len, prompt_len + 12)]
    assert [plan.restored_end for plan in plans] == [0] * 4 + [prompt_len] + [0] * 7
    fitting = RequestInfo(8, 16)
    ledger.commit("s", ledger.preview("s", 0, 8, fitting), fitting)
    ledger.take_step({"s": 8})
    for n in range(8, 15):
        plan = ledger.preview("s", n, n + 1, None)
        ledger.commit("s", plan, None)
        ledger.take_step({"s": 1})
        assert plan.restored_end == 0


@pytest.mark.parametrize("falls_back_at", [13, 14, 15, 16, 40])
def test_under_pressure_a_request_grows_until_it_falls_back(falls_back_at: int) -> None:
    """Its next token is appended, C - 1 survive; up to C tokens there is nothing to pack."""
    ledger = Ledger(BUDGET, 4, Rules("pressure"))
    run(ledger, 0, 10, prompt_len=10)
    for length in range(10, falls_back_at):
        plan = run(ledger, length, length + 1, prompt_len=10)
        assert (plan.grows, plan.overwrites, plan.selects) == (True, False, False)
        assert plan.attended_len == plan.resident_end == plan.held_end == length + 1
        assert not ledger.states["r"].is_full
    ledger.falling_back.add("r")
    plan = run(ledger, falls_back_at, falls_back_at + 1, prompt_len=10)
    packs = falls_back_at >= 16
    assert (plan.attended_len, plan.overwrites) == (falls_back_at + 1, False)
    assert (plan.falls_back, plan.num_survivors) == (packs, 15 if packs else 0)
    assert plan.num_evicted == (falls_back_at + 1 - 15 if packs else 0)
    assert plan.selects == (falls_back_at == 15)
    assert plan.held_end == (16 if packs else falls_back_at + 1)
    assert not ledger.falling_back
    for length in range(falls_back_at + 1, 60):
        plan = run(ledger, length, length + 1, prompt_len=10)
        assert not plan.grows
        assert plan.attended_len == min(16, length + 1)
    assert ledger.states["r"].is_full


@pytest.mark.parametrize(("prompt_len", "survivors"), [(10, 0), (15, 0), (16, 15), (40, 15)])
def test_a_prompt_that_ends_while_memory_is_short(prompt_len: int, survivors: int) -> None:
    """It keeps C - 1 tokens. A short one has nothing to give, and goes on growing."""
    ledger = Ledger(BUDGET, 4, Rules("pressure"))
    run(ledger, 0, 5, prompt_len)
    ledger.is_short = True
    assert run(ledger, 5, prompt_len, prompt_len).num_survivors == survivors
    ledger.is_short = False
    assert ledger.states["r"].grows is (survivors == 0)


def test_preview_changes_nothing() -> None:
    """It may be asked twice, and pages may not be granted."""
    ledger = Ledger(BUDGET, block_size=4)
    first = ledger.preview("r", 0, 5, RequestInfo(9))
    assert ledger.preview("r", 0, 5, RequestInfo(9)) == first
    assert not ledger.states
    assert not ledger.take_step({}).requests


def test_a_request_preempted_in_its_own_step_leaves_the_plan() -> None:
    """It may come back with a longer prompt: generated tokens are computed again."""
    ledger = Ledger(BUDGET, block_size=4)
    ledger.commit("r", ledger.preview("r", 0, 5, RequestInfo(5)), RequestInfo(5))
    ledger.close("r")
    assert not ledger.take_step({}).requests
    assert run(ledger, 0, 9, prompt_len=9).in_prompt


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [
        (4, 6, "tokens \\[4, 6\\) are scheduled while 5 are computed"),
        (5, 5, "tokens \\[5, 5\\)"),
        (5, 10, "cross the end of the prompt at 9"),
    ],
)
def test_lengths_that_contradict_each_other_raise(start: int, end: int, message: str) -> None:
    """A chunk that does not follow, is empty, or runs over the prompt's end."""
    ledger = Ledger(BUDGET, block_size=4)
    run(ledger, 0, 5, prompt_len=9)
    with pytest.raises(IntegrityError, match=message):
        ledger.preview("r", start, end, RequestInfo(9))


def test_two_tokens_past_the_prompt_raise() -> None:
    """Speculative tokens cannot be undone, so they never get here."""
    ledger = Ledger(BUDGET, block_size=4)
    run(ledger, 0, 5, prompt_len=5)
    with pytest.raises(IntegrityError, match="more drafts than there is room for"):
        ledger.preview("r", 5, 7, RequestInfo(5))


def test_a_plan_that_is_not_the_schedule_raises() -> None:
    """Scheduled without pages, or pages without a schedule, or twice."""
    ledger = Ledger(BUDGET, block_size=4)
    plan = ledger.preview("r", 0, 5, RequestInfo(5))
    ledger.commit("r", plan, RequestInfo(5))
    with pytest.raises(IntegrityError, match="scheduled twice"):
        ledger.commit("r", plan, RequestInfo(5))
    with pytest.raises(IntegrityError, match="the ledger"):
        ledger.take_step({"r": 5, "other": 1})


def test_which_requests_are_split() -> None:
    """A request is split from the step on that evicts from its prompt, if heads share slots."""
    for splits, prompt_len, split in ((True, 16, True), (True, 15, False), (False, 16, False)):
        ledger = Ledger(BUDGET, 4, Rules(splits=splits))
        first = run(ledger, 0, 10, prompt_len)
        last = run(ledger, 10, prompt_len, prompt_len)
        later = [run(ledger, prompt_len + i, prompt_len + i + 1, prompt_len) for i in range(5)]
        assert (first.is_split, last.is_split) == (False, split)
        assert (last.splits, last.attends_split) == (split, False)
        assert [plan.attends_split for plan in later] == [split] * 5
        assert not any(plan.splits for plan in later)
        assert later[-1].overwrites


def test_turn_after_shared_slots_takes_a_token_a_step() -> None:
    """Each overwrites a victim; a turn after slots that are not shared is computed in chunks."""
    ledger = Ledger(BUDGET, 4, Rules(splits=True, continues=True, lifetime=3))
    run(ledger, 0, 20, 20)
    turn = ledger.states["r"].left(3)
    assert turn == Left(20, 15, restored_end=20, shared_len=16, prompt=(0, 20))
    assert turn.num_slots == 16
    info = RequestInfo(30, turn=turn)
    assert ledger.align_chunk("s", 20, 10, info.prompt_end) == 1
    for start in range(20, 33):
        assert start == 20 or ledger.align_chunk("s", start, 10, 30) == 1
        plan = ledger.preview("s", start, start + 1, info)
        ledger.commit("s", plan, info)
        ledger.take_step({"s": 1})
        assert plan.attends_split and not plan.in_prompt and not plan.restored_end
        assert (plan.overwrites, plan.selects) == (start > 20, True)
    assert ledger.stats.continuation_queries == 20 + 30
    assert ledger.stats.continuation_hits == 20
    with pytest.raises(IntegrityError, match="cross the end"):
        ledger.preview("s", 33, 35, info)
    whole = RequestInfo(30, turn=Left(20, 15))
    assert ledger.align_chunk("t", 20, 10, whole.prompt_end) == 10


def in_requests(budget: Budget, rules: Rules, prompt_len: int, ends: set[int]) -> list[RequestPlan]:
    """Plans of a prompt and 40 tokens, by requests that end after so many of these."""
    ledger, plans, turn = Ledger(budget, 4, rules), [], None
    for after in range(41):
        start, end = (prompt_len + after - 1 if after else 0), prompt_len + after
        info = RequestInfo(end, turn=turn)
        plans.append(ledger.preview("r", start, end, info))
        ledger.commit("r", plans[-1], info)
        ledger.take_step({"r": end - start})
        if after in ends:
            turn = ledger.states["r"].left(rules.lifetime)
            ledger.close("r")
    return plans


@given(
    ends=st.sets(st.integers(0, 39)),
    prompt_len=st.integers(1, 40),
    lifetime=st.sampled_from([0, 3, 20]),
    kind=st.sampled_from(["one", "five", "page", "heads"]),
)
def test_requests_that_go_on_plan_what_one_does(
    ends: set[int], prompt_len: int, lifetime: int, kind: str
) -> None:
    """Wherever they end: survivors, victims, recent tokens, the end of a term's lifetime."""
    every = {"five": 5, "page": 4}.get(kind, 1)
    budget = replace(BUDGET, capacity=15 + every, evict_every=every, first_recent=4)
    if kind == "page":
        budget = replace(budget, capacity=20, num_heavy=8, unit=4)
    rules = Rules(splits=kind == "heads", continues=True, lifetime=lifetime)
    whole = in_requests(budget, rules, prompt_len, set())
    assert in_requests(budget, rules, prompt_len, ends) == whole


def test_positions_that_roll() -> None:
    """Counted anew when the next would be past the limit, and not before; never past it."""
    ledger = Ledger(BUDGET, 4, Rules("chunk", position_limit=40))
    first = run(ledger, 0, 24, 70)
    second = run(ledger, 24, 40, 70)
    assert (first.renumbers_from, second.renumbers_from, second.position_end) == (0, 0, 40)
    third = run(ledger, 40, 64, 70)  # 15 tokens of the first 40 are left
    assert (third.renumbers_from, third.position_start, third.position_end) == (40, 15, 39)
    assert (third.logical_start, third.offset) == (40, 25)
    last = run(ledger, 64, 70, 70)
    assert (last.renumbers_from, last.offset, last.position_start) == (39, 49, 15)
    at = [run(ledger, n, n + 1, 70) for n in range(70, 140)]
    assert all(plan.position_end <= 40 for plan in at)
    renumbered = [plan for plan in at if plan.renumbers_from]
    assert {plan.renumbers_from for plan in renumbered} == {40}
    assert {plan.position_start for plan in renumbered} == {16}  # the victim is still there
    ends = [plan.logical_start for plan in renumbered]
    assert {b - a for a, b in zip(ends, ends[1:], strict=False)} == {24}


def test_more_tokens_than_positions_raise() -> None:
    """Whoever admits a request asks for all of it; what is committed must have positions."""
    ledger = Ledger(BUDGET, 4, Rules("chunk", position_limit=40))
    plan = ledger.preview("r", 0, 41, RequestInfo(100))
    with pytest.raises(IntegrityError, match="would have position 40, and there are 40"):
        ledger.commit("r", plan, RequestInfo(100))
