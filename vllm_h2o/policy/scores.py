"""The ways to accumulate and rank attention, by the name that a user gives: one table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class SecondPass(Enum):
    """What counts of a prompt's queries when they score a second time, rotated past its end."""

    MEAN = "mean"
    LARGEST = "largest"
    RECONSTRUCTION = "reconstruction"
    """The largest, of queries that the model has when it reads the prompt a second time."""


@dataclass(frozen=True)
class Score:
    """One way to turn attention probabilities into a rank.

    Args:
        meaning: one line for ``--help``.
        power: of the probabilities that are added: 1, or 2 for squares.
        by_age: whether the sum is divided by the number of queries since the token was stored.
        second_pass: whether a prompt's queries score a second time, and what counts of that.
        window: whether its last queries, the observation window, score once more by maximum.

    """

    meaning: str
    power: int = 1
    by_age: bool = False
    second_pass: SecondPass | None = None
    window: bool = False

    @property
    def reads_again(self) -> bool:
        """Whether the model reads a prompt a second time."""
        return self.second_pass is SecondPass.RECONSTRUCTION


SCORES: dict[str, Score] = {
    "sum": Score("accumulated attention, the paper's"),
    "sum_squares": Score("accumulated squared attention", power=2),
    "mean": Score("attention per query since the token was stored", by_age=True),
    "mean_squares": Score("squared attention per query since then", power=2, by_age=True),
    "second_pass": Score(
        "mean_squares, and a prompt's queries score a second time from past its end",
        power=2,
        by_age=True,
        second_pass=SecondPass.MEAN,
    ),
    "combined": Score(
        "mean_squares, and by maximum what a second pass gives and what the prompt's last "
        "queries give",
        power=2,
        by_age=True,
        second_pass=SecondPass.LARGEST,
        window=True,
    ),
    "reconstruction": Score(
        "combined, but for the second pass the model reads the prompt again, a block at a time",
        power=2,
        by_age=True,
        second_pass=SecondPass.RECONSTRUCTION,
        window=True,
    ),
}
