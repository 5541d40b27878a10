# SPDX-License-Identifier: Apache-2.0
"""The request in docs/design.md, worked by hand once more, and against the scheduler."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction

import pytest

from tools import docs, worked_example
from tools.worked_example import CASES, PROMPT_LEN, WEIGHTS, moments

TEXT = (docs.DOCS / "design.md").read_text(encoding="utf-8")
each_case = pytest.mark.parametrize("name", CASES)


@each_case
def test_worked_example_in_the_docs_is_computed(name: str) -> None:
    """The part of docs/design.md is the one that ``python -m tools.docs`` writes."""
    start, end = docs.part_of(TEXT, f"example of {name}")
    assert TEXT[start:end] == worked_example.example(name), "run: python -m tools.docs"


@each_case
def test_worked_example_plans_agree_with_the_scheduler(name: str) -> None:
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
            assert len(held) == plan.budget.capacity // size


State = tuple[list[int], list[Fraction], int | None]
"""Tokens in slots, their scores, and the slot that the next token overwrites."""


class ByHand:
    """Slots of one head, as a reader fills them in: fractions on paper."""

    def __init__(self) -> None:
        self.slots, self.scores = list(range(PROMPT_LEN)), [Fraction(0)] * PROMPT_LEN
        for query in range(PROMPT_LEN):
            self.attend(query)

    def attend(self, last: int) -> None:
        """Let one query pay each token that it sees."""
        seen = [token for token in self.slots if token <= last]
        for index, token in enumerate(self.slots):
            if token in seen:
                self.scores[index] += Fraction(WEIGHTS[token], sum(WEIGHTS[t] for t in seen))

    def keep(self, indices: list[int]) -> None:
        """Move some of the tokens to the first slots."""
        for held in (self.slots, self.scores):
            held[:] = [held[index] for index in sorted(indices)]

    def state(self, victim: int | None) -> State:
        """A copy."""
        return list(self.slots), list(self.scores), victim

    def by_token(self) -> list[State]:
        """After each token past the prompt: the three best and the last four tokens stay."""
        best = sorted(range(PROMPT_LEN - 4), key=lambda token: -self.scores[token])[:3]
        self.keep([*best, *range(PROMPT_LEN - 4, PROMPT_LEN)])
        states, victim = [], 7
        for token in range(PROMPT_LEN, len(WEIGHTS)):
            self.slots[victim : victim + 1] = [token]
            self.scores[victim : victim + 1] = [Fraction(0)]
            self.attend(token)
            old = [index for index, other in enumerate(self.slots) if other <= token - 4]
            victim = min(old, key=lambda index: (self.scores[index], -self.slots[index]))
            states.append(self.state(victim))
        return states

    def by_page(self) -> list[State]:
        """After each token past the prompt: of four full pages of two the lowest goes."""
        # Tokens 9 and 10 are recent, and page 5 is not full: of pages 0 to 3 two stay.
        self._drop_pages(2)
        states = []
        for token in range(PROMPT_LEN, len(WEIGHTS)):
            self.slots.append(token)
            self.scores.append(Fraction(0))
            self.attend(token)
            if len(self.slots) == 8:
                self._drop_pages(1)
            states.append(self.state(None))
        return states

    def _drop_pages(self, num: int) -> None:
        """Drop whole pages that hold neither of the last two tokens."""
        able = [
            i
            for i in range(0, len(self.slots) - 1, 2)
            if max(self.slots[i : i + 2]) < self.slots[-2]
        ]
        lowest = sorted(able, key=lambda i: (sum(self.scores[i : i + 2]), -i))[:num]
        gone = {index for i in lowest for index in (i, i + 1)}
        self.keep([index for index in range(len(self.slots)) if index not in gone])


@pytest.mark.parametrize(
    ("name", "by_hand"), [("token", ByHand.by_token), ("page", ByHand.by_page)]
)
def test_worked_example_agrees_with_a_count_by_hand(
    name: str, by_hand: Callable[[ByHand], list[State]]
) -> None:
    """Fractions on paper give the tokens, scores and victims of every step after the prompt."""
    each = [moment for moment in moments(name) if not moment.plan.in_prompt]
    ends = [m for m in each if m.packed or not m.plan.num_survivors]
    for moment, (slots, scores, victim) in zip(ends, by_hand(ByHand()), strict=True):
        assert list(moment.positions) == slots
        assert list(moment.scores) == pytest.approx([float(score) for score in scores])
        assert moment.victim == victim


def test_worked_example_with_a_prefix_hit_equals_a_cold_run() -> None:
    """B finds two pages of A's, computes three tokens, and holds what A held."""
    cold, hit = ([m for m in moments("prefix") if m.request_id == who] for who in "AB")
    assert (cold[0].plan.logical_start, hit[0].plan.logical_start) == (0, 8)
    assert cold[0].row[:2] == hit[0].row[:2]
    for ours, theirs in zip(hit, cold, strict=True):
        assert ours.positions == theirs.positions
        assert ours.scores == pytest.approx(theirs.scores)


def test_worked_example_names_the_victims() -> None:
    """The sentences after the first example name the tokens that the tables show."""
    first, *others = (m for m in moments("token") if m.victim is not None)
    assert first.positions[first.victim or 0] == 3
    assert "token 3 has the lowest score" in re.sub(r"\s+", " ", TEXT)
    assert {m.victim for m in others} & {first.victim} == set()
