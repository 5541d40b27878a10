"""What one step asks of the kernels, whatever device they are for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scoring:
    """What attention adds to the score of a token.

    Args:
        power: 0 adds nothing: scores stay what tokens are stored with; 1 adds each probability, 2
            its square.
        skip_recent: a query adds to tokens that are at least so many positions older than it; 0
            lets each token's own query count.
        by_page: whether pages are ranked, by the sum of their tokens' scores, and not tokens.
        by_age: whether a score is ranked as a mean: divided by the number of queries since the
            token was stored, its own among them.
        replays: whether the queries of a prompt's chunk are asked again, from behind its end.

    """

    power: int = 1
    skip_recent: int = 0
    by_page: bool = False
    by_age: bool = False
    replays: bool = False


REPLAY_WEIGHT = 4.0
"""How much a prompt's queries count when they are asked again, beside a mean over all others."""

DECODE_ORDERS = (
    "token",
    "attended",
    "overwrites",
    "selects",
    "position",
    "recent_from",
    "num_sinks",
    "seed",
    "refill",
    "hole",
    "scores",
)
"""Rows of :attr:`DecodeBatch.orders`."""


@dataclass(frozen=True)
class DecodeBatch:
    """B requests with one query each; P pages in the longest.

    A request whose ``attended`` is 0 is padding: nothing of it is read or written but its output.

    Args:
        table: [B, P], int32: block ids; whatever stands behind a request's own is never touched.
        orders: [len(DECODE_ORDERS), B], int64, of any strides, one row each:

            token: row of the request's token in the step's q, k, v.
            attended: slots [0, attended) are attended to, but for the hole.
            overwrites: 1 where the new token takes slot ``victim + refill``; elsewhere it takes
                slot ``attended - 1``.
            selects: 1 where a victim is chosen after this step.
            position: of the new token.
            recent_from: positions from here on are never victims.
            num_sinks: positions below are never victims.
            seed: of the ``random`` policy.
            refill: slots of the victim's page that are taken already; 0 where tokens are ranked.
            hole: slots behind the new token's that hold evicted tokens and are not attended to.
            scores: 1 where the query adds to scores.

    """

    table: torch.Tensor
    orders: torch.Tensor

    def order(self, name: str) -> torch.Tensor:
        """[B], int64: one row of the orders."""
        return self.orders[DECODE_ORDERS.index(name)]

    @property
    def owner(self) -> torch.Tensor:
        """[B], int32: each request's first block id, under which its victims are kept."""
        return self.table[:, 0]


@dataclass(frozen=True)
class PromptChunk:
    """T tokens of one request's prompt.

    Args:
        tokens: rows of the chunk in the step's q, k, v.
        table: [P], int32: ids of the blocks that hold slots [0, start + T), and whatever stands
            behind them, which is never touched.
        start: slots in use before the chunk; slots [0, start + i] are attended to by query i.
        position: of the first token.
        keep: tokens that survive the chunk; 0 when nothing is packed.
        recent_from: positions from here on survive.
        num_sinks: positions below survive.
        seed: of the ``random`` policy.
        scores_from: queries of the chunk from here on add to scores.
        watch_from: queries from here on score where ``into`` is given: beside the pages.
        into: [P'], int32: ids of the blocks that survivors are copied to; None: those that they are
            in, whose first slots are rewritten.

    """

    tokens: slice
    table: torch.Tensor
    start: int
    position: int
    keep: int
    recent_from: int
    num_sinks: int
    seed: int
    scores_from: int = 0
    watch_from: int = 0
    into: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens.stop - self.tokens.start

    @property
    def position_end(self) -> int:
        """One past the position of the last token."""
        return self.position + self.num_tokens

    @property
    def end(self) -> int:
        """Slots in use after the chunk, before anything is packed."""
        return self.start + self.num_tokens


def page_rows(table: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Rows of the page views that hold each KV head's part of some blocks.

    Args:
        table: [..., P], integers: block ids.
        num_kv_heads: H.

    Returns:
        [..., H, P], int64.

    """
    heads = torch.arange(num_kv_heads, dtype=torch.int64, device=table.device)
    return table.to(torch.int64)[..., None, :] * num_kv_heads + heads[:, None]
