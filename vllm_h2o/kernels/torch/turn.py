"""The next turn of a conversation: what an earlier request has left, in pages of the next one's.

Twin of ``reference.Head.begin_turn``, batched over KV heads; for every set of kernels, because it
is done once in a turn. Everything is read before anything is written, so that pages may be among
those that are written to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_h2o.kernels.cache import LayerCache, first_slots

LAST = 2**31 - 1
"""Where a slot is free, in the place of a position: after all others."""


@dataclass(frozen=True)
class HeldTokens:
    """All that the slots of one request hold, of one layer, in order of position.

    Args:
        views: of each of the cache's views, [H, num_tokens, ...].

    """

    views: tuple[torch.Tensor, ...]

    @classmethod
    def of(
        cls,
        cache: LayerCache,
        blocks: torch.Tensor,
        num_slots: int,
        num_free_slots: int = 0,
        victims: torch.Tensor | None = None,
        restored_end: int = 0,
    ) -> HeldTokens:
        """Copy them.

        Args:
            cache: read.
            blocks: [P], integers: those that hold the slots.
            num_slots: slots in use, free ones included.
            num_free_slots: the last of a victim block that hold evicted tokens.
            victims: [H], integers: where that block begins, of each KV head; None without any.
            restored_end: tokens at positions below, a prompt's, get the scores that they had
                without its observation window; 0: all keep theirs.

        """
        block_size = cache.block_size
        rows = cache.rows(blocks)
        position = cache.position[rows].flatten(1)[:, :num_slots]  # [H, num_slots]
        if num_free_slots:
            assert victims is not None
            slot = torch.arange(num_slots, device=position.device)
            end = victims.to(slot.dtype)[:, None] + block_size
            is_free = (slot >= end - num_free_slots) & (slot < end)
            position = position.masked_fill(is_free, LAST)
        slot = position.argsort(dim=1)[:, : num_slots - num_free_slots]
        at = (rows.gather(1, slot // block_size), slot % block_size)
        held = [view[at] for view in _views(cache)]
        if cache.score_without_window is not None:
            if restored_end:
                of_prompt = held[3] < restored_end
                held[2] = torch.where(of_prompt, held[4], held[2])
            held[4] = held[2]
        return cls(tuple(held))

    def store(self, cache: LayerCache, blocks: torch.Tensor) -> None:
        """Write them to the first slots of some blocks.

        Args:
            cache: written.
            blocks: [P], integers: those that hold the slots from now on.

        """
        at = first_slots(cache, blocks, self.views[0].shape[1])
        for view, held in zip(_views(cache), self.views, strict=True):
            view[at] = held


def _views(cache: LayerCache) -> list[torch.Tensor]:
    """What a slot has; float8 is moved as it is."""
    views = [cache.key, cache.value, cache.score, cache.position]
    if cache.score_without_window is not None:
        views.append(cache.score_without_window)
    return views
