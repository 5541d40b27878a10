# SPDX-License-Identifier: Apache-2.0
"""When tokens are evicted, and how many at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

At = Literal["prompt_end", "chunk", "pressure"]
Unit = Literal["token", "page"]


@dataclass(frozen=True)
class Eviction:
    """The schedule of evictions. It goes with every ranking.

    Args:
        at: when a request is first cut to its budget. ``prompt_end``: at its prompt's end.
            ``chunk``: after each chunk of the prompt. ``pressure``: when the pool runs short.
        every: tokens that are evicted at a time in decode. 1: the next token overwrites the one
            with the lowest rank. More: a request takes this many slots, then survivors are packed.
        unit: what is ranked and evicted: a token, or a page: whole pages, by the sum of the ranks
            of their tokens. ``every`` is then a multiple of the page size.

    """

    at: At = "prompt_end"
    every: int = 1
    unit: Unit = "token"

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"at least one token is evicted at a time: {self}")

    @property
    def by_page(self) -> bool:
        """Whether whole pages are evicted."""
        return self.unit == "page"

    @property
    def overwrites(self) -> bool:
        """Whether the next token takes its victim's slot: nothing moves in decode."""
        return self.every == 1 and not self.by_page
