# SPDX-License-Identifier: Apache-2.0
"""Survivors of a prompt, or of several tokens past it: which they are, and their move.

Twin of ``reference.pack_survivors``, batched over KV heads. The C++ kernels, too, copy survivors
out of pages that other requests read with this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from vllm_h2o.kernels.batch import PromptChunk, Scoring
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.torch.prefill import chunk_slots

PLAIN = Scoring()


def copy_survivors(
    caches: Sequence[LayerCache], chunk: PromptChunk, scoring: Scoring, scores: torch.Tensor
) -> None:
    """As :meth:`~vllm_h2o.kernels.interface.Kernels.copy_survivors` has it, layer by layer."""
    for cache, score in zip(caches, scores, strict=True):
        pack_survivors(cache, chunk, scoring, score)


def pack_survivors(
    cache: LayerCache,
    chunk: PromptChunk,
    scoring: Scoring = PLAIN,
    score: torch.Tensor | None = None,
) -> None:
    """Move each KV head's survivors into its first slots, in order of position.

    Args:
        cache: rewritten: in place, or in the pages ``chunk.destination_blocks``; ``first_rows``,
            too, where heads share slots.
        chunk: with survivors.
        scoring: how scores are ranked, and whether by whole pages.
        score: [H, attended_len], float32, of slots [0, attended_len); None: those of the pages.

    """
    if score is None:
        score = chunk_slots(cache, cache.score, chunk)
    ranked = _ranked(cache, chunk, scoring, score)
    blocks = chunk.block_table if chunk.destination_blocks is None else chunk.destination_blocks
    block_size = cache.block_size
    head = cache.first_head + torch.arange(cache.num_kv_heads, device=ranked.device)[:, None]
    row_step = cache.rows_per_block
    first_row, num_survivors, width = head, None, chunk.num_survivors
    if chunk.splits:
        assert cache.first_rows is not None
        bounds = _split_rows(ranked, chunk, block_size, cache.shared_tenths)
        cache.first_rows[blocks[0]] = bounds.to(torch.int32)
        first_row, row_step = bounds[:-1, None], 1
        num_survivors = (bounds.diff() * block_size - 1)[:, None]
        width = int(num_survivors.max())
    # Slots are in order of position: a stable sort leaves the older of equals in front.
    best = ranked.sort(dim=1, descending=True, stable=True).indices[:, :width]
    slot = torch.arange(width, device=best.device).expand_as(best)
    if num_survivors is not None:
        best = best.masked_fill(slot >= num_survivors, chunk.attended_len)
        slot = slot.clamp(max=num_survivors - 1)  # what a head has no room for is its last again
    survivor = best.sort(dim=1).values.gather(1, slot)
    source_row = head + survivor // block_size * cache.rows_per_block
    source = _at(cache, chunk.block_table, source_row)
    target = _at(cache, blocks, first_row + slot // block_size * row_step)
    source_at, target_at = (source, survivor % block_size), (target, slot % block_size)
    for view in (cache.key, cache.value, cache.position, cache.score_without_window):
        if view is not None:
            view[target_at] = view[source_at]
    cache.score[target_at] = score.gather(1, survivor)
    if cache.mass is not None:
        cache.mass[target_at] = 1.0  # nothing is merged before a request is full for the first time


def _ranked(
    cache: LayerCache, chunk: PromptChunk, scoring: Scoring, score: torch.Tensor
) -> torch.Tensor:
    """[H, attended_len]: the rank of each token; infinite for sinks and recent ones.

    By page it is the sum of the page's ranks; infinite for a page that has such a token or is not
    full.
    """
    position = chunk_slots(cache, cache.position, chunk).to(torch.int64)
    length, block_size = chunk.attended_len, cache.block_size
    if scoring.by_age:
        score = score / (chunk.logical_end - position)
    safe = (position >= chunk.recent_start) | (position < chunk.num_sinks)
    if scoring.by_page:
        rest = (0, -length % block_size)
        sums = pad(score, rest).unflatten(1, (-1, block_size)).sum(dim=2)
        safe = pad(safe, rest, value=True).unflatten(1, (-1, block_size)).any(dim=2)
        score, safe = (
            page.repeat_interleave(block_size, dim=1)[:, :length] for page in (sums, safe)
        )
    return score.masked_fill(safe, float("inf"))


def _split_rows(
    ranked: torch.Tensor, chunk: PromptChunk, block_size: int, shared_tenths: int
) -> torch.Tensor:
    """[H + 1], int64: where each KV head's rows begin; twin of ``split.split_capacity``.

    Args:
        ranked: [H, attended_len]; infinite what survives in any case.
        chunk: the last one of a prompt.
        block_size: slots of a page.
        shared_tenths: see :class:`LayerCache`.

    """
    num_heads, length = ranked.shape
    capacity, num_heavy = chunk.num_survivors + 1, chunk.num_heavy
    competing = ranked.masked_fill(ranked == float("inf"), float("-inf")).flatten()
    best = competing.sort(descending=True, stable=True).indices[: num_heads * num_heavy]
    count = torch.bincount(best // length, minlength=num_heads)
    unit = 10 * block_size
    tenths = 10 * capacity + shared_tenths * (count - num_heavy)
    least = -(-(capacity - num_heavy + min(num_heavy, 1)) // block_size)
    most = (length + 1) // block_size
    pages = (tenths // unit).clamp(min=least)
    total = num_heads * capacity // block_size
    # Of each head less than a page was cut off, and less than a page was added.
    for _ in range(num_heads):
        missing = tenths - pages * unit
        neediest = missing.masked_fill(pages >= most, missing.min() - 1).argmax()
        richest = missing.masked_fill(pages <= least, missing.max() + 1).argmin()
        more = total - pages.sum()
        pages[neediest] += more.clamp(0, 1)
        pages[richest] += more.clamp(-1, 0)
    return pad(pages.cumsum(0), (1, 0))


def _at(cache: LayerCache, blocks: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Rows of the cache, int64, of rows of a request's blocks, counted block after block."""
    step = cache.rows_per_block
    return blocks[row // step].to(torch.int64) * step + row % step
