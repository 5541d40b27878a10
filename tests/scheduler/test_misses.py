# SPDX-License-Identifier: Apache-2.0
"""Later turns that might have continued and do not, and requests that are none."""

from __future__ import annotations

import logging

import pytest

from tests.scheduler.conversations import TENANTS, Talking, entries_of, first_turn, talk
from vllm_h2o.scheduler.misses import HEAD


def misses(talking: Talking) -> int:
    """Later turns since the last look that might have continued and did not."""
    return talking.scheduler.stats_reporter.report().continuation_misses


@pytest.mark.parametrize("asked", [5, 30, 41])
@pytest.mark.parametrize("at", [0, 3, 5])
def test_misses_of_turns_that_break_in_the_answer_are_counted(
    at: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its first, a later or its last token; the first of them has a line in the log."""
    lines: list[str] = []
    logger = logging.getLogger("vllm.kv_policy")
    talking = talk()
    monkeypatch.setattr(logger, "info", lambda message, *args: lines.append(message % args))
    talking.say(range(100, 100 + asked), 7, TENANTS[0])
    talking.drain()
    text = talking.said[-1][1]
    broken = asked + at
    for last in (210, 209):
        talking.say([*text[:broken], 250, *text[broken + 1 :], *range(200, last)], 2, TENANTS[0])
        talking.drain()
    assert (misses(talking), talking.count["continue"]) == (2, 0)
    (line,) = lines
    assert f"at token {broken} of {asked + 6}, counted from 0" in line


@pytest.mark.parametrize("head", [1, 4, HEAD])
def test_misses_where_the_prompt_s_end_is_gone_are_counted(head: int) -> None:
    """A template that begins the answer with an empty thought gives it back without."""
    talking = talk()
    text = first_turn(talking)
    talking.say([*text[: 30 - head], *text[30:], *range(200, 210)], 2, TENANTS[0])
    talking.drain()
    assert (misses(talking), talking.count["continue"]) == (1, 0)


def test_misses_are_only_turns_that_might_have_continued() -> None:
    """No miss: the same again, another question, less of it, other weights, another tenant."""
    talking = talk()
    text = first_turn(talking)
    changed = [*text[:32], 99, *range(200, 212)]
    others = (
        (text[:30], TENANTS[0]),
        (text[:33], TENANTS[0]),
        ([*text[:15], *range(200, 230)], TENANTS[0]),
        ([*text[:26], *range(200, 230)], TENANTS[0]),
        ([*text, 1, 2, 3], TENANTS[0]),
        (changed, TENANTS[1]),
        (changed, TENANTS[3]),
    )
    for prompt, tenant in others:
        talking.say(prompt, 1, tenant)
        talking.drain()
    entries_of(talking).weights.call("reload_weights")
    talking.say(changed, 1, TENANTS[0])
    talking.drain()
    assert misses(talking) == 0


def test_misses_where_another_entry_begins_more_are_none() -> None:
    """A regenerated answer: the next turn continues from the one that was chosen."""
    talking = talk()
    text = first_turn(talking)
    first_turn(talking)
    again = talking.said[-1][1]
    assert again[30:] != text[30:]
    for said in (text, again):
        talking.say([*said, 1], 1, TENANTS[0])
    talking.drain()
    assert (misses(talking), talking.count["continue"]) == (0, 2)


def test_misses_of_a_request_that_waits_are_counted_once() -> None:
    """It is looked at in each step until it has room; and not again after a preemption."""
    talking = talk(num_blocks=16)
    text = first_turn(talking)
    talking.say(range(100, 140), 9, TENANTS[1])
    talking.step()
    talking.say([*text[:32], 99, *range(200, 212)], 2, TENANTS[0])
    talking.drain()
    assert misses(talking) <= 1
