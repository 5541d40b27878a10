"""How the slots of a sequence are divided.

::

    position   0 ..                                                        .. n-1
               |-sinks-|------ heavy hitters: the best scores ------|--recent--|
               |<------------------------- kept = C - 1 ---------------------->| next |
               |<--------------------------- capacity C ---------------------------->|

``kept = sinks + heavy + recent`` tokens survive each step; the one slot that is left takes the next
token (the paper's H + R, with the slot that the new token needs).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """The slots of one sequence.

    Args:
        capacity: slots that a sequence may hold once it is full; a whole number of pages.
        num_heavy: heavy hitters kept, by score.
        num_recent: most recent positions kept.
        num_sinks: first positions kept.

    """

    capacity: int
    num_heavy: int
    num_recent: int
    num_sinks: int

    def __post_init__(self) -> None:
        if min(self.num_heavy, self.num_recent, self.num_sinks) < 0:
            raise ValueError(f"negative part of a budget: {self}")
        if self.num_sinks + self.num_heavy + self.num_recent != self.capacity - 1:
            raise ValueError(f"sinks + heavy + recent must be capacity - 1: {self}")

    @property
    def kept(self) -> int:
        """Tokens that survive a step: ``capacity - 1``."""
        return self.capacity - 1

    def holds(self, prompt_len: int, max_len: int) -> bool:
        """Whether a request is never evicted from, at its prompt's end or after it.

        Args:
            prompt_len: tokens of its prompt.
            max_len: those, and all that may follow.

        """
        return prompt_len <= self.kept and max_len <= self.capacity


def minimum_slots(recent_ratio: float, num_sinks: int) -> int:
    """Fewest slots with which a sequence goes on: sinks, a recent token if any, the next token."""
    return num_sinks + (1 if recent_ratio > 0 else 0) + 1


def split_budget(slots: int, block_size: int, recent_ratio: float, num_sinks: int) -> Budget:
    """Round ``slots`` up to whole pages and divide them.

    Args:
        slots: slots asked for, at least ``minimum_slots(recent_ratio, num_sinks)``.
        block_size: slots of a page.
        recent_ratio: fraction of the kept tokens beyond the sinks that is the recent window, in
            [0, 1]; a half rounds in favour of the recent window, and no ratio above 0 leaves it
            empty.
        num_sinks: first positions that are never evicted.

    """
    capacity = math.ceil(slots / block_size) * block_size
    rest = capacity - 1 - num_sinks
    least = 1 if recent_ratio > 0 else 0
    num_recent = min(rest, max(least, math.floor(recent_ratio * rest + 0.5)))
    return Budget(capacity, rest - num_recent, num_recent, num_sinks)
