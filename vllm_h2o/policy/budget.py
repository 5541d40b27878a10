# SPDX-License-Identifier: Apache-2.0
"""How the slots of a sequence are divided.

::

    position   0 ..                                                        .. n-1
               |-sinks-|------ heavy hitters: the best ranks -------|--recent--|
               |<-------------- kept = C - evict_every tokens ---------------->| next |
               |<------------------------- capacity C slots ------------------------>|

``kept = sinks + heavy + recent`` tokens survive an eviction. The ``evict_every`` slots that are
left take the next tokens (the paper's H + R, with the slot that the new token needs). Whole pages
are evicted where ``unit`` is the page size: the page that is not full yet survives as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_h2o.pages import num_pages
from vllm_h2o.policy.eviction import Eviction

ALL_RECENT = 2**31 - 1
"""``first_recent`` where the recent window is whole from the prompt's end on."""


@dataclass(frozen=True)
class Budget:
    """The slots of one sequence.

    Args:
        capacity: slots that a sequence may hold after its prompt; whole pages where
            ``evict_every`` is 1 or whole pages are evicted.
        num_heavy: heavy hitters kept, by rank.
        num_recent: most recent positions kept.
        num_sinks: first positions kept.
        evict_every: tokens that are evicted at a time in decode.
        unit: tokens that are ranked and evicted together: 1, or the page size.
        first_recent: recent positions kept when the prompt ends, whose last tokens compete with
            all others; each later token adds one, up to ``num_recent``.

    Raises:
        ValueError: when the parts do not add up.

    """

    capacity: int
    num_heavy: int
    num_recent: int
    num_sinks: int
    evict_every: int = 1
    unit: int = 1
    first_recent: int = ALL_RECENT

    def __post_init__(self) -> None:
        if min(self.num_heavy, self.num_recent, self.num_sinks, self.first_recent) < 0:
            raise ValueError(f"negative part of a budget: {self}")
        if self.evict_every < 1:
            raise ValueError(f"no slot is left for the next token: {self}")
        if self.num_sinks + self.num_heavy + self.num_recent != self.kept:
            raise ValueError(f"sinks + heavy + recent must be capacity - evict_every: {self}")
        if self.capacity % self.unit or self.evict_every % self.unit:
            raise ValueError(f"capacity and evict_every are whole units: {self}")

    @property
    def kept(self) -> int:
        """Tokens that survive an eviction: ``capacity - evict_every``; see :meth:`survivors`."""
        return self.capacity - self.evict_every

    @property
    def overwrites(self) -> bool:
        """Whether the next token takes its victim's slot: nothing moves in decode."""
        return self.evict_every == 1

    @property
    def parts(self) -> str:
        """The parts of the budget, in words."""
        left = "1 for the incoming token"
        if self.evict_every > 1:
            left = f"{self.evict_every} for incoming tokens"
        return f"{self.num_heavy} heavy, {self.num_recent} recent, {self.num_sinks} sinks, {left}"

    def recent_at(self, num_after: int) -> int:
        """Count the recent positions that are kept.

        Args:
            num_after: tokens after the prompt; below 0 within the prompt.

        """
        if num_after < 0:
            return self.num_recent
        return min(self.num_recent, self.first_recent + num_after)

    def survivors(self, length: int) -> int:
        """Tokens that survive when survivors are chosen among ``length`` resident tokens.

        With whole pages the last page, which is not full, survives next to ``kept`` tokens.
        """
        return min(length, self.kept + (length - self.kept) % self.unit)

    def holds(self, prompt_len: int, max_len: int) -> bool:
        """Whether a request is never evicted from, at its prompt's end or after it.

        Args:
            prompt_len: tokens of its prompt.
            max_len: those, and all that may follow.

        """
        return self.survivors(prompt_len) == prompt_len and max_len <= self.capacity

    def most_slots(self, chunk: int) -> int:
        """Most slots of a sequence that is evicted from after each chunk of its prompt.

        Args:
            chunk: most tokens of one.

        """
        return max(self.kept + self.unit - 1 + chunk, self.capacity)


def minimum_slots(
    recent_ratio: float,
    num_sinks: int,
    eviction: Eviction = Eviction(),  # noqa: B008 (frozen)
    block_size: int = 1,
) -> int:
    """Fewest slots with which a sequence goes on: sinks, a recent token if any, the next tokens.

    Where whole pages are evicted, each of these takes pages of its own, and one page stays.
    """
    recent = 1 if recent_ratio > 0 else 0
    if eviction.by_page:
        stays = max(num_pages(num_sinks, block_size) + recent, 1)
        pages = stays + eviction.every
        return pages * block_size
    return num_sinks + recent + 1


def split_budget(
    slots: int,
    block_size: int,
    recent_ratio: float,
    num_sinks: int,
    eviction: Eviction = Eviction(),  # noqa: B008 (frozen)
    max_len: int | None = None,
    first_recent: int = ALL_RECENT,
) -> Budget:
    """Round ``slots`` up to whole pages and divide them.

    With ``eviction.every`` tokens at a time, ``every - 1`` slots come on top. Where whole pages are
    evicted, none do: the pages that the next tokens fill are part of the budget.

    Args:
        slots: slots asked for, at least :func:`minimum_slots`.
        block_size: slots of a page.
        recent_ratio: fraction of the kept tokens beyond the sinks that is the recent window, in
            [0, 1]; a half rounds in favour of the recent window, and no ratio above 0 leaves it
            empty.
        num_sinks: first positions that are never evicted.
        eviction: how many tokens are evicted at a time, and in which unit.
        max_len: longest sequence: its pages are the most that any takes, so fewer tokens are
            evicted at a time where those would come to more; None: nothing limits it.
        first_recent: of the budget.

    """
    capacity = num_pages(slots, block_size) * block_size
    least = 1 if recent_ratio > 0 else 0
    if eviction.by_page:
        every = eviction.every * block_size
        rest = capacity - every - num_sinks
        # A page with a sink or a recent token is protected whole.
        most_recent = capacity - every - num_pages(num_sinks, block_size) * block_size
        num_recent = min(most_recent, max(least, math.floor(recent_ratio * rest + 0.5)))
        heavy, unit = rest - num_recent, block_size
        return Budget(capacity, heavy, num_recent, num_sinks, every, unit, first_recent)
    every = eviction.every
    if max_len is not None:
        most = num_pages(max_len, block_size) * block_size
        every = min(every, max(most - capacity, 0) + 1)
    rest = capacity - 1 - num_sinks
    num_recent = min(rest, max(least, math.floor(recent_ratio * rest + 0.5)))
    slots = capacity + every - 1
    return Budget(slots, rest - num_recent, num_recent, num_sinks, every, 1, first_recent)
