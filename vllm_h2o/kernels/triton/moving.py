# SPDX-License-Identifier: Apache-2.0
"""How survivors of prompts are moved, every layer at once: the launches of pack.py and share.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from vllm_h2o.kernels.batch import PromptChunk, Scoring
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.triton import pack, share
from vllm_h2o.kernels.triton.chunks import DeviceChunks
from vllm_h2o.kernels.triton.sizes import SELECT_TILE, STORE_TILE, kv_shape

BITS = share.BITS.value
MAX_SURVIVORS = 1 << 24
"""Slots that are listed at once, of as many layers as they are enough for: 64 MiB."""


@dataclass(frozen=True)
class Moving:
    """Moves survivors in layers of one shape.

    Args:
        head_size: D.
        device: of the pages.

    """

    head_size: int
    device: torch.device

    def __call__(
        self,
        caches: Sequence[LayerCache],
        chunks: Sequence[PromptChunk],
        scoring: Scoring,
        scores: torch.Tensor | None = None,
    ) -> None:
        """Move the survivors of each chunk.

        Args:
            caches: of every layer, or of all as one; rewritten.
            chunks: with survivors: any that stay in their own blocks, or one that does not.
            scoring: what is ranked.
            scores: [len(caches), H, attended_len], float32, contiguous: of the one chunk with
                ``destination_blocks``. None: those of the pages.

        """
        if len(chunks) > 1 and any(chunk.splits for chunk in chunks):
            # Each alone: those of the longest take the most room, and all would be given as much.
            for chunk in chunks:
                self(caches, [chunk], scoring, scores)
            return
        # Of heads that share slots on average, with the one that each leaves free.
        max_survivors = max(chunk.num_survivors + chunk.splits for chunk in chunks)
        listed = caches[0].num_kv_heads * len(chunks) * max_survivors
        size = max(1, MAX_SURVIVORS // max(1, listed))
        for i in range(0, len(caches), size):
            own = None if scores is None else scores[i : i + size]
            self._move(caches[i : i + size], chunks, scoring, own, max_survivors)

    def _move(
        self,
        caches: Sequence[LayerCache],
        chunks: Sequence[PromptChunk],
        scoring: Scoring,
        scores: torch.Tensor | None,
        max_survivors: int,
    ) -> None:
        """Some layers at once; the list has room for ``max_survivors`` times their KV heads."""
        cache = caches[0]
        sent = DeviceChunks.of(chunks, pack.PACK_FIELDS, self.device)
        new_table = sent.block_table
        if scores is not None:
            (destination,) = [chunk.destination_blocks for chunk in chunks]
            assert destination is not None and scores.is_contiguous()
            new_table = torch.stack([destination])  # as aligned as any: no kernel more
        shares = any(chunk.splits for chunk in chunks)
        addresses = self._addresses(caches, scores, shares)
        host = torch.tensor(addresses, pin_memory=self.device.type == "cuda")
        sent_bases = host.to(self.device, non_blocking=True)
        keys, values, ranked, new_scores, positions, without, first_rows = sent_bases
        num_kv_heads = cache.num_kv_heads
        grid = (num_kv_heads, len(sent), len(caches))
        listed = (len(caches), len(sent), num_kv_heads * max_survivors)
        survivors = torch.empty(listed, dtype=torch.int32, device=self.device)
        tables = (sent.block_table, new_table, sent.fields)
        sizes = (sent.block_table.stride(0), len(sent), cache.rows_per_block)
        apart = {"APART": scores is not None}
        keeps = {"KEEPS": cache.score_without_window is not None}
        ranking = {"N": cache.block_size, "BY_AGE": scoring.by_age}
        if shares:
            assert num_kv_heads == cache.rows_per_block, "a layer that shares slots, alone"
            reached = survivors.new_zeros(len(caches), len(sent), BITS)
            counts = survivors.new_empty(len(caches), len(sent), num_kv_heads, 2)
            for bit in range(BITS + 1):
                share.count_best[grid](
                    ranked, positions, sent.block_table, sent.fields, reached, counts,
                    cache.score.stride(0), *sizes, bit, **ranking, **apart, TILE=SELECT_TILE,
                    num_warps=8,
                )  # fmt: skip
            share.share_rows[grid[1:]](
                first_rows, new_table, sent.fields, counts, *sizes, cache.shared_tenths,
                N=cache.block_size, H_PAD=triton.next_power_of_2(num_kv_heads),
            )  # fmt: skip
        pack.select_survivors[grid](
            ranked, positions, first_rows, *tables, survivors, cache.score.stride(0), *sizes,
            max_survivors, **ranking, **apart, TILE=SELECT_TILE, BY_PAGE=scoring.by_page,
            CAN_SPLIT=shares, num_warps=8,
        )  # fmt: skip
        pack.pack_survivors[grid](
            keys, values, ranked, new_scores, positions, without, *tables, survivors, cache.key,
            cache.key.stride(0), cache.score.stride(0), *sizes, max_survivors,
            **kv_shape(cache.block_size, self.head_size), **apart, **keeps, TILE=STORE_TILE,
            ALIGNED=math.gcd(16, *addresses[0], *addresses[1]),
        )  # fmt: skip
        if shares:
            self._move_shared(caches, sent, new_table, survivors, scores)
        for layer in caches if scores is not None else ():
            if layer.mass is not None:  # nothing is merged before a request is full
                layer.mass.index_fill_(0, layer.rows(new_table[0]).flatten(), 1.0)

    def _addresses(
        self, caches: Sequence[LayerCache], scores: torch.Tensor | None, shares: bool
    ) -> list[list[int]]:
        """Address each layer's K, V, ranked scores, scores, positions, kept scores, first rows."""
        moved = [_moved(cache) for cache in caches]
        own = [
            [view[cache.first_head :].data_ptr() for cache, view in zip(caches, views, strict=True)]
            for views in zip(*moved, strict=True)
        ]
        own.append([getattr(c, "first_rows" if shares else "position").data_ptr() for c in caches])
        ranked = own[2] if scores is None else [layer.data_ptr() for layer in scores]
        # An even number, so that every row begins where 16 bytes do, however many the layers.
        rest = [0] * (len(caches) % 2)
        return [row + rest for row in [*own[:2], ranked, *own[2:]]]

    def _move_shared(
        self,
        caches: Sequence[LayerCache],
        sent: DeviceChunks,
        new_table: torch.Tensor,
        survivors: torch.Tensor,
        scores: torch.Tensor | None,
    ) -> None:
        """Layer by layer, by way of a copy of one layer's survivors."""
        cache, slots = caches[0], survivors.shape[-1]
        options = {"APART": scores is not None, "KEEPS": cache.score_without_window is not None}
        kept = [
            torch.empty(len(sent) * slots, *view.shape[2:], dtype=view.dtype, device=self.device)
            for view in _moved(cache)
        ]
        most = max(share.most_survivors(chunk, cache) for chunk in sent.source)
        grid = (cache.num_kv_heads, len(sent), triton.cdiv(most, STORE_TILE))
        for index, layer in enumerate(caches):
            key, value, score, *words = _moved(layer)
            ranked = score if scores is None else scores[index]
            for stores in (False, True):
                share.move_shared[grid](
                    key, value, ranked, score, *words, layer.first_rows, sent.block_table,
                    new_table, sent.fields, survivors, *kept, index, cache.key.stride(0),
                    cache.score.stride(0), sent.block_table.stride(0), len(sent),
                    cache.num_kv_heads, slots,
                    **kv_shape(cache.block_size, self.head_size), TILE=STORE_TILE, STORES=stores,
                    **options,
                )  # fmt: skip


def _moved(cache: LayerCache) -> tuple[torch.Tensor, ...]:
    """The views that move with a token; without a kept score no kernel reads the last."""
    more = cache.score if cache.score_without_window is None else cache.score_without_window
    return cache.key, cache.value, cache.score, cache.position, more
