# SPDX-License-Identifier: Apache-2.0
"""Counts the pages of entries in the workers' host memory, and says what to copy there and drop.

The scheduler keeps the book alone, in integers, so that all ranks hold the same entries. A worker
copies an entry before the step that takes one of its pages, and drops others after it: see
worker/turns.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from vllm_h2o.errors import IntegrityError
from vllm_h2o.wire import Saved


class HostMemory:
    """Entries by number, least recently used first.

    Args:
        num_pages: most pages of all of them.

    Attributes:
        num_used: pages of the entries that there are.
        num_saved: entries that steps have copied since the last report.
        num_displaced: entries that they have dropped for others since then.

    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_used = self.num_saved = self.num_displaced = 0
        self._num_named = 0
        self._numbers = count()
        self._sizes: dict[int, int] = {}
        self._saved: dict[int, Saved] = {}
        self._dropped: list[int] = []

    def too_many(self, num_pages: int) -> Iterator[int]:
        """Name entries until there is room for another one; the caller drops each.

        Args:
            num_pages: of the other one, at most :attr:`num_pages`.

        """
        while self.num_used + num_pages > self.num_pages:
            self._num_named += 1
            yield next(iter(self._sizes))

    def save(self, source: tuple[int, ...], num_used: int = 0) -> int:
        """Have an entry copied before the next step.

        Args:
            source: ids of its blocks.
            num_used: as in :class:`~vllm_h2o.wire.Saved`.

        Returns:
            Its number.

        """
        number = next(self._numbers)
        self._sizes[number] = len(source)
        self.num_used += len(source)
        self._saved[number] = Saved(number, source, num_used)
        return number

    def use(self, number: int) -> None:
        """Make an entry the most recently used one."""
        self._sizes[number] = self._sizes.pop(number)

    def drop(self, number: int) -> None:
        """Have an entry dropped after the next step, which may still read it."""
        self.num_used -= self._sizes.pop(number)
        self._dropped.append(number)

    def forget_copies(self) -> None:
        """Have nothing copied that is not copied yet, once all entries are dropped."""
        self._dropped = [number for number in self._dropped if number not in self._saved]
        self._saved.clear()
        self._num_named = 0

    def take(self) -> tuple[tuple[Saved, ...], tuple[int, ...]]:
        """Take what a step copies, and what it drops."""
        saved, dropped = tuple(self._saved.values()), tuple(self._dropped)
        self.num_saved += len(saved)
        self.num_displaced += self._num_named
        self._num_named = 0
        self._saved.clear()
        self._dropped.clear()
        return saved, dropped

    def take_counts(self) -> dict[str, int]:
        """Take the counts since the last report, by field of ``PolicyStats``."""
        saved, displaced = self.num_saved, self.num_displaced
        self.num_saved = self.num_displaced = 0
        return {"continuation_host_saves": saved, "continuation_host_drops": displaced}

    def check_integrity(self, numbers: set[int]) -> None:
        """Compare the book with the entries that are known.

        Args:
            numbers: of these entries.

        Raises:
            IntegrityError: when one is not counted, or not known, or pages are miscounted.

        """
        num_used = sum(self._sizes.values())
        if numbers != self._sizes.keys() or not num_used == self.num_used <= self.num_pages:
            raise IntegrityError(
                f"host memory counts entries {sorted(self._sizes)} with {self.num_used} of "
                f"{self.num_pages} pages; known are {sorted(numbers)} with {num_used}"
            )
