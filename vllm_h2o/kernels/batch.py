"""What one step asks of the kernels, whatever device they are for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DecodeBatch:
    """B requests with one query each; P pages in the longest, L = P * N slots.

    Args:
        token: [B], int64: row of each request's token in the step's q, k, v.
        rows: [B, H, P], int64: rows of the page views; whatever stands behind a request's own pages
            is never written.
        attended: [B], int64: slots [0, attended) are attended to.
        append_slot: [B], int64: the slot of the new token, where no victim is taken.
        overwrites: [B], bool: whether the new token takes its victim's slot instead.
        selects: [B], bool: whether the request is full after this step.
        owner: [B], int64: the request's first block id, under which its victims are kept.
        position: [B], int64: of the new token.
        recent_from: [B], int64: positions from here on are never victims.
        num_sinks: [B], int64: positions below are never victims.
        seed: [B], int64: of the ``random`` policy.

    """

    token: torch.Tensor
    rows: torch.Tensor
    attended: torch.Tensor
    append_slot: torch.Tensor
    overwrites: torch.Tensor
    selects: torch.Tensor
    owner: torch.Tensor
    position: torch.Tensor
    recent_from: torch.Tensor
    num_sinks: torch.Tensor
    seed: torch.Tensor


@dataclass(frozen=True)
class PromptChunk:
    """T tokens of one request's prompt.

    Args:
        tokens: rows of the chunk in the step's q, k, v.
        rows: [H, P], int64: rows of the page views, P pages that hold [0, start + T).
        start: slots in use before the chunk; slots [0, start + i] are attended to by query i.
        position: of the first token.
        keep: tokens that survive the chunk; 0 when nothing is packed.
        recent_from: positions from here on survive.
        num_sinks: positions below survive.
        seed: of the ``random`` policy.

    """

    tokens: slice
    rows: torch.Tensor
    start: int
    position: int
    keep: int
    recent_from: int
    num_sinks: int
    seed: int

    @property
    def end(self) -> int:
        """Slots in use after the chunk, before anything is packed."""
        return self.start + self.tokens.stop - self.tokens.start
