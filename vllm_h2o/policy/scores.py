"""The ways to accumulate and rank attention, by the name that a user gives: one table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """One way to turn attention probabilities into a rank.

    Args:
        power: of the probabilities that are added: 1, or 2 for squares.
        by_age: whether the sum is divided by the number of queries since the token was stored.
        second_pass: whether a prompt's queries score a second time, rotated past its end.
        meaning: one line for ``--help``.

    """

    power: int
    by_age: bool
    second_pass: bool
    meaning: str


SCORES: dict[str, Score] = {
    "sum": Score(1, False, False, "accumulated attention, the paper's"),
    "sum_squares": Score(2, False, False, "accumulated squared attention"),
    "mean": Score(1, True, False, "attention per query since the token was stored"),
    "mean_squares": Score(2, True, False, "squared attention per query since then"),
    "second_pass": Score(
        2, True, True, "mean_squares, and a prompt's queries score a second time from past its end"
    ),
}
