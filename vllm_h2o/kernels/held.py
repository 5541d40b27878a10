# SPDX-License-Identifier: Apache-2.0
"""Copies of what one ended request held, of one layer: a later one continues from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm_h2o.kernels.cache import LayerCache, first_slots

VIEWS = ("key", "value", "score", "position", "score_without_window")
"""Parts of a slot; the last one where a term has a lifetime."""
REQUEST = ("victims", "first_rows")
"""Parts kept under the first block of a request; the last one where KV heads may share slots."""


@dataclass(frozen=True)
class Held:
    """A copy of the pages of one request, of one layer, as they are.

    Args:
        parts: by attribute of :class:`LayerCache`; views of pages are [H, P, N, ...].

    """

    parts: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, cache: LayerCache, blocks: torch.Tensor, num_used: int = 0) -> Held:
        """Copy what a request holds; float8 is moved as it is.

        Args:
            cache: read.
            blocks: [P], integers: the request's.
            num_used: slots in use of each KV head: later ones, in which others may have left
                something, are zeros in the copy. 0: all are in use.

        """
        parts = {}
        for names, at in ((VIEWS, cache.rows(blocks)), (REQUEST, blocks[:1])):
            for name in names:
                if (view := getattr(cache, name)) is not None:
                    parts[name] = view[at]
                    if num_used and name in VIEWS:
                        flat = parts[name].flatten(1, 2)
                        flat[:, num_used:] = 0
                        parts[name] = flat.unflatten(1, (len(blocks), -1))
        return cls(parts)

    def store(self, cache: LayerCache, blocks: torch.Tensor, restored_end: int = 0) -> None:
        """Write it to as many blocks: each token keeps its slot.

        Args:
            cache: written.
            blocks: [P], integers: the blocks that hold the slots from now on.
            restored_end: tokens at positions below get the scores that they had without the term
                with a lifetime; 0: all keep theirs.

        """
        rows = cache.rows(blocks)
        for name, part in self._restored(restored_end).items():
            getattr(cache, name)[blocks[:1] if name in REQUEST else rows] = part

    def store_in_order(
        self, cache: LayerCache, blocks: torch.Tensor, num_slots: int, restored_end: int = 0
    ) -> None:
        """Write its tokens to the first slots of some blocks, in order of position.

        Where other layers keep states, these may have been in the last block. As K or V of unused
        slots they may be no numbers, which some kernels would multiply by 0: such slots are zeros.

        Args:
            cache: written.
            blocks: [P], integers: the blocks that hold the slots from now on, no more than needed.
            num_slots: slots in use, as many in each KV head.
            restored_end: as in :meth:`store`.

        """
        at = first_slots(cache, blocks, num_slots)
        position = self.parts["position"].flatten(1)[:, :num_slots]
        order = position.argsort(dim=1)  # [H, num_slots]
        heads = torch.arange(len(order), device=order.device)[:, None]
        last, num_last = cache.rows(blocks[-1:]), num_slots % cache.block_size
        for name, part in self._restored(restored_end).items():
            if name in VIEWS:
                view = getattr(cache, name)
                view[at] = part.flatten(1, 2)[heads, order]
                if num_last:
                    view[last, num_last:] = 0

    def to(self, device: torch.device) -> Held:
        """The same copy on a device."""
        return Held({name: part.to(device) for name, part in self.parts.items()})

    def _restored(self, end: int) -> dict[str, torch.Tensor]:
        """The parts after the end of a term's lifetime, for tokens at positions below ``end``."""
        parts = dict(self.parts)
        if end and (without := parts.get("score_without_window")) is not None:
            parts["score"] = torch.where(parts["position"] < end, without, parts["score"])
        return parts
