"""The request that docs/design.md works by hand: once more by hand, and against the scheduler."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import pytest

from tools import docs, worked_example
from tools.worked_example import CASES, PROMPT_LEN, WEIGHTS, moments

TEXT = (docs.DOCS / "design.md").read_text(encoding="utf-8")
each_case = pytest.mark.parametrize("name", CASES)


@each_case
def test_the_text_is_what_happens(name: str) -> None:
    """The part of docs/design.md is the one that ``python -m tools.docs`` writes."""
    start, end = docs.part_of(TEXT, f"example of {name}")
    assert TEXT[start:end] == worked_example.example(name), "run: python -m tools.docs"


@each_case
def test_the_plan_is_what_happens(name: str) -> None:
    """Lengths, pages and free pages of the scheduler are those that the reference needs."""
    size, total = CASES[name].block_size, worked_example.NUM_BLOCKS - 1
    for moment in moments(name):
        plan, slots = moment.plan, len(moment.positions)
        packs_now = plan.num_survivors > 0 and not moment.packed
        assert slots == (plan.attended_len if packs_now else plan.resident_end)
        held = [page for page in moment.row if page is not None]
        assert moment.num_free == total - len(held)
        first = plan.pack_block_idx if moment.packed else plan.first_block_idx
        assert len(moment.row) >= first + math.ceil(slots / size)
        assert None not in moment.row[first:]
        if not plan.in_prompt:
            assert len(held) == plan.capacity // size
            assert moment.positions.count(-1) == plan.num_free_slots


def by_hand() -> list[tuple[list[int], list[Fraction], int]]:
    """The example of single tokens as a reader would: tokens in slots, scores, the next slot."""

    def attend(last: int) -> None:
        reach = [token for token in slots if token <= last]
        for index, token in enumerate(slots):
            if token in reach:
                scores[index] += Fraction(WEIGHTS[token], sum(WEIGHTS[t] for t in reach))

    slots, scores = list(range(PROMPT_LEN)), [Fraction(0)] * PROMPT_LEN
    for query in range(PROMPT_LEN):
        attend(query)
    best = sorted(range(PROMPT_LEN - 4), key=lambda token: -scores[token])[:3]
    kept = sorted([*best, *range(PROMPT_LEN - 4, PROMPT_LEN)])
    slots, scores = kept, [scores[token] for token in kept]
    states, victim = [], 7
    for token in range(PROMPT_LEN, len(WEIGHTS)):
        slots[victim : victim + 1], scores[victim : victim + 1] = [token], [Fraction(0)]
        attend(token)
        old = [index for index, other in enumerate(slots) if other <= token - 4]
        victim = min(old, key=lambda index: (scores[index], -slots[index]))
        states.append((list(slots), list(scores), victim))
    return states


def test_by_hand() -> None:
    """Fractions on paper give the tokens, scores and victims of every step after the prompt."""
    steps = [moment for moment in moments("token") if not moment.plan.in_prompt]
    for moment, (slots, scores, victim) in zip(steps, by_hand(), strict=True):
        assert list(moment.positions) == slots
        assert list(moment.scores) == pytest.approx([float(score) for score in scores])
        assert moment.victim == victim


def test_a_hit_is_a_cold_run() -> None:
    """B finds two pages of A's, computes three tokens, and holds what A held."""
    cold, hit = ([m for m in moments("prefix") if m.request_id == who] for who in "AB")
    assert (cold[0].plan.logical_start, hit[0].plan.logical_start) == (0, 8)
    assert cold[0].row[:2] == hit[0].row[:2]
    for ours, theirs in zip(hit, cold, strict=True):
        assert ours.positions == theirs.positions
        assert ours.scores == pytest.approx(theirs.scores)


def test_what_the_text_says_of_victims() -> None:
    """The sentences after the first example name the tokens that the tables show."""
    first, *others = (m for m in moments("token") if m.victim is not None)
    assert first.positions[first.victim or 0] == 3
    assert "token 3 has the lowest score" in re.sub(r"\s+", " ", TEXT)
    assert {m.victim for m in others} & {first.victim} == set()
