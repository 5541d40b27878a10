# SPDX-License-Identifier: Apache-2.0
"""The plan: lengths that follow from its numbers, and its trip to other processes."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_h2o.errors import IntegrityError
from vllm_h2o.policy import Budget
from vllm_h2o.wire import Plans, PolicyStats, RequestPlan, ResidencyPlan

BUDGET = Budget(capacity=64, num_heavy=56, num_recent=7, num_sinks=0)


def plan(**numbers: Any) -> RequestPlan:
    """A plan past the prompt, with 64 slots; whatever is not given is zero."""
    names = [field.name for field in dataclasses.fields(RequestPlan)]
    values: dict[str, Any] = {**dict.fromkeys(names, 0), "num_new": 1, "budget": BUDGET, **numbers}
    return RequestPlan(**values)


@given(start=st.integers(0, 63))
def test_plan_of_a_growing_request(start: int) -> None:
    """Below capacity a token takes a slot more, and attends to it too."""
    step = plan(logical_start=start, resident_start=start)
    assert not step.overwrites
    assert step.attended_len == step.resident_end == start + 1
    assert step.logical_end == start + 1


@given(extra=st.integers(0, 10**6))
def test_plan_of_a_full_request_overwrites(extra: int) -> None:
    """At capacity a token takes its victim's slot: the length stays, however long the text."""
    step = plan(logical_start=64 + extra, resident_start=64)
    assert step.overwrites
    assert step.attended_len == step.resident_end == 64
    assert step.logical_end == 65 + extra


@given(start=st.integers(0, 4096), num_new=st.integers(1, 4096))
@example(start=64, num_new=1)
def test_plan_of_a_prompt_keeps_it_whole(start: int, num_new: int) -> None:
    """Inside the prompt nothing is overwritten, not even at exactly capacity or beyond."""
    chunk = plan(logical_start=start, resident_start=start, num_new=num_new, prompt_end=9999)
    assert not chunk.overwrites
    assert chunk.attended_len == chunk.resident_end == start + num_new


@given(start=st.integers(0, 4096), num_new=st.integers(1, 4096))
def test_plan_of_the_last_chunk_packs(start: int, num_new: int) -> None:
    """The whole prompt is attended to; what remains is what was ordered to be kept."""
    chunk = plan(
        logical_start=start,
        resident_start=start,
        num_new=num_new,
        prompt_end=start + num_new,
        num_survivors=63,
    )
    assert (chunk.attended_len, chunk.resident_end) == (start + num_new, 63)


def test_first_token_after_packing_fills_the_last_slot() -> None:
    """Packing leaves capacity - 1 tokens: one is appended before the first is overwritten."""
    first = plan(logical_start=300, resident_start=63)
    assert not first.overwrites and first.resident_end == 64
    assert plan(logical_start=301, resident_start=first.resident_end).overwrites


def test_plans_survive_pickling() -> None:
    """Comparable, and the same after a trip to another process."""
    sent = ResidencyPlan({"a": plan(num_new=3), "b": plan(offset=7)})
    assert pickle.loads(pickle.dumps(sent)) == sent


def test_plans_of_requests_that_repeat_travel_by_name() -> None:
    """Full, a request's position alone moves; filling, its slots, too. What was told stays."""
    full, filling = plan(logical_start=80, resident_start=64), plan(resident_start=5)
    steps = [{"full": full, "filling": filling}, {}, {"filling": plan(resident_start=9)}, {}]
    told, whole = Plans(), {}
    for changed in steps:
        ongoing = tuple(whole.keys() - changed)
        whole = dict(told.complete(ResidencyPlan(changed, ongoing)).requests)
    assert whole["full"] == plan(logical_start=83, resident_start=64)
    assert whole["filling"] == plan(logical_start=1, resident_start=10)
    assert (full, filling) == (plan(logical_start=80, resident_start=64), plan(resident_start=5))
    assert not told.complete(ResidencyPlan({}), gone=["full"]).requests
    with pytest.raises(IntegrityError, match="request full is ongoing, but has no plan"):
        told.complete(ResidencyPlan({}, ["full"]))


def test_plan_has_integers_only() -> None:
    """Nothing on the wire needs torch, or a device."""
    kinds = {field.type for field in dataclasses.fields(RequestPlan)}
    assert kinds == {"int", "bool", "Budget"}
    assert {field.type for field in dataclasses.fields(Budget)} == {"int"}


@pytest.mark.parametrize(
    ("numbers", "evicted"),
    [
        ({"resident_start": 63}, 0),
        ({"resident_start": 64}, 1),
        ({"resident_start": 63, "num_survivors": 48}, 16),
        ({"prompt_end": 200, "resident_start": 90, "num_new": 10}, 0),
        ({"prompt_end": 10, "resident_start": 90, "num_new": 10, "num_survivors": 63}, 37),
    ],
    ids=["growing", "full", "a page", "prompt", "packed"],
)
def test_plan_counts_evicted_tokens(numbers: dict[str, int], evicted: int) -> None:
    """A victim counts when it is overwritten, others when survivors are packed."""
    assert plan(**numbers).num_evicted == evicted


def test_stats_are_taken_out_as_put_in() -> None:
    """They are taken out as they were put in, and leave what was there before."""
    sent = PolicyStats(*range(len(dataclasses.fields(PolicyStats))))
    carrier = {"other": 9}
    assert PolicyStats.take_from(carrier) is None
    sent.put_into(carrier)
    assert len(carrier) == 1 + len(dataclasses.fields(PolicyStats))
    assert PolicyStats.take_from(carrier) == sent
    assert carrier == {"other": 9}


@given(offset=st.integers(0, 2**31), position=st.integers(0, 2**20))
def test_plan_with_rolling_positions_counts_from_its_offset(offset: int, position: int) -> None:
    """A token's position is its index less the offset; recent tokens are the same ones."""
    step = plan(logical_start=offset + position, offset=offset)
    assert (step.position_start, step.position_end) == (position, position + 1)
    assert step.recent_start == position + 1 - 7
