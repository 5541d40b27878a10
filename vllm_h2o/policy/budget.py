"""How the slots of a sequence are divided.

::

    position   0 ..                                                        .. n-1
               |-sinks-|------ heavy hitters: the best scores ------|--recent--|
               |<------------------------- kept = C - 1 ---------------------->| next |
               |<--------------------------- capacity C ---------------------------->|

``kept = sinks + heavy + recent`` tokens survive each step; the one slot that is left takes the next
token (the paper's H + R, with the slot that the new token needs). Where tokens are evicted ``s`` at
a time, ``s`` slots are left: a sequence grows from ``kept`` to ``kept + s``, and ``s`` of them go.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """The slots of one sequence.

    Args:
        capacity: slots that a sequence may hold once it is full; a whole number of pages where
            ``evict_every`` is 1.
        num_heavy: heavy hitters kept, by score.
        num_recent: most recent positions kept.
        num_sinks: first positions kept.
        evict_every: tokens that fill the slots which are left, and how many are evicted then.

    """

    capacity: int
    num_heavy: int
    num_recent: int
    num_sinks: int
    evict_every: int = 1

    def __post_init__(self) -> None:
        if min(self.num_heavy, self.num_recent, self.num_sinks) < 0:
            raise ValueError(f"negative part of a budget: {self}")
        if self.evict_every < 1:
            raise ValueError(f"no slot is left for the next token: {self}")
        if self.num_sinks + self.num_heavy + self.num_recent != self.kept:
            raise ValueError(f"sinks + heavy + recent must be capacity - evict_every: {self}")

    @property
    def kept(self) -> int:
        """Tokens that survive an eviction: ``capacity - evict_every``."""
        return self.capacity - self.evict_every

    @property
    def parts(self) -> str:
        """What the slots are for, in words."""
        left = "1 for the incoming token"
        if self.evict_every > 1:
            left = f"{self.evict_every} for incoming tokens"
        return f"{self.num_heavy} heavy, {self.num_recent} recent, {self.num_sinks} sinks, {left}"

    def holds(self, prompt_len: int, max_len: int) -> bool:
        """Whether a request is never evicted from, at its prompt's end or after it.

        Args:
            prompt_len: tokens of its prompt.
            max_len: those, and all that may follow.

        """
        return prompt_len <= self.kept and max_len <= self.capacity

    def most_slots(self, chunk: int) -> int:
        """Most slots of a sequence whose prompt is packed after each of its chunks.

        Args:
            chunk: most tokens of one.

        """
        return max(self.kept + chunk, self.capacity)


def minimum_slots(recent_ratio: float, num_sinks: int) -> int:
    """Fewest slots with which a sequence goes on: sinks, a recent token if any, the next token."""
    return num_sinks + (1 if recent_ratio > 0 else 0) + 1


def split_budget(
    slots: int,
    block_size: int,
    recent_ratio: float,
    num_sinks: int,
    evict_every: int = 1,
    max_len: int | None = None,
) -> Budget:
    """Round ``slots`` up to whole pages and divide them; ``evict_every - 1`` more come on top.

    Args:
        slots: slots asked for, at least ``minimum_slots(recent_ratio, num_sinks)``.
        block_size: slots of a page.
        recent_ratio: fraction of the kept tokens beyond the sinks that is the recent window, in
            [0, 1]; a half rounds in favour of the recent window, and no ratio above 0 leaves it
            empty.
        num_sinks: first positions that are never evicted.
        evict_every: tokens that are evicted at a time.
        max_len: longest sequence: its pages are the most that any takes, so ``evict_every`` is
            smaller where it would come to more; None: nothing limits it.

    """
    capacity = math.ceil(slots / block_size) * block_size
    rest = capacity - 1 - num_sinks
    if max_len is not None:
        most = math.ceil(max_len / block_size) * block_size
        evict_every = min(evict_every, max(most - capacity, 0) + 1)
    least = 1 if recent_ratio > 0 else 0
    num_recent = min(rest, max(least, math.floor(recent_ratio * rest + 0.5)))
    slots = capacity + evict_every - 1
    return Budget(slots, rest - num_recent, num_recent, num_sinks, evict_every)
