# SPDX-License-Identifier: Apache-2.0
"""Layer caches of random tokens, copied and compared."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.harness import Shape, empty_cache, views
from vllm_h2o.kernels.batch import PromptChunk
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.kernels.triton.kernels import TritonKernels

VIEWS = ("key", "value", "score", "position")


def views_of(cache: LayerCache) -> tuple[str, ...]:
    """Names of the views of its slots."""
    more = [name for name in ("mass", "score_without_window") if getattr(cache, name) is not None]
    return (*VIEWS, *more)


def on_triton(shape: Shape) -> Kernels:
    """In the interpreter here."""
    num_heads = shape.num_kv_heads * shape.group
    return TritonKernels(torch.device("cpu"), 8, num_heads, shape.num_kv_heads, shape.head_size)


SHAPE = Shape(num_kv_heads=2, group=3, head_size=64, block_size=16)
LAYERS = replace(SHAPE, num_layers=3)
"""Layers that share slots; the caches below are of the one in the middle."""
BOTH = pytest.mark.parametrize("shape", [SHAPE, LAYERS], ids=["alone", "of several"])


def filled(
    shape: Shape,
    num_blocks: int,
    seed: int,
    splits: bool = False,
    merges: bool = False,
    keeps_scores: bool = False,
) -> LayerCache:
    """Pages of random tokens; each page's positions follow one another."""
    draw = torch.Generator().manual_seed(seed)
    empty = empty_cache(shape, num_blocks, merges + keeps_scores)
    cache = views(empty, shape, splits, merges, keeps_scores)
    for view in (cache.key, cache.value):
        view.copy_(torch.randn(view.shape, generator=draw))
    # Few levels: ties are common.
    cache.score.copy_(torch.randint(0, 9, cache.score.shape, generator=draw) / 8)
    cache.position.copy_(torch.arange(cache.position.numel()).view(cache.position.shape) % 999)
    if cache.mass is not None:
        cache.mass.copy_(torch.randint(1, 6, cache.mass.shape, generator=draw))
    if cache.score_without_window is not None:
        cache.score_without_window.copy_(torch.rand(cache.score.shape, generator=draw))
    return cache


def copied(cache: LayerCache, shape: Shape) -> LayerCache:
    """The same tokens elsewhere."""
    held = (cache.first_rows, cache.mass, cache.score_without_window)
    splits, merges, keeps_scores = (view is not None for view in held)
    empty = empty_cache(shape, cache.num_blocks, merges + keeps_scores)
    twin = views(empty, shape, splits, merges, keeps_scores)
    for name in (*views_of(cache), *(("first_rows",) if splits else ())):
        getattr(twin, name).copy_(getattr(cache, name))
    return twin


def same(ours: LayerCache, theirs: LayerCache, num_blocks: int) -> None:
    """All tokens and scores of the first blocks; means may be rounded either way."""
    rows = slice(0, num_blocks * ours.rows_per_block)
    for name in views_of(theirs):
        one, other = getattr(ours, name)[rows].float(), getattr(theirs, name)[rows].float()
        merged = theirs.mass is not None and name in ("key", "value")
        rtol = max(1e-5, torch.finfo(theirs.key.dtype).eps) if merged else 1e-5
        torch.testing.assert_close(one, other, rtol=rtol, atol=2e-6, msg=name)


def number(cache: LayerCache, chunks: list[PromptChunk]) -> None:
    """Give the chunks' slots, and those before them, the positions of a prompt."""
    every, size = slice(None), cache.block_size
    for chunk in chunks:
        blocks = chunk.block_table[: -(-chunk.attended_len // size)].long()
        position = torch.arange(len(blocks) * size, dtype=torch.int32).view(-1, 1, size)
        cache.position.unflatten(0, (-1, cache.rows_per_block))[blocks, every] = position


def prompt_chunks(
    shape: Shape, packs: bool, by_page: bool = False
) -> tuple[list[PromptChunk], int]:
    """Chunks at the start, after others, of two tokens, and one that does not score.

    With ``packs`` each has survivors; with ``by_page`` whole pages and the one that is not full.
    """
    chunks, owned, token = [], 0, 3
    starts = ((0, 70, 0), (41, 30, 7), (33, 2, 0), (0, 17, 16), (4, 9, 9))
    for start, num_tokens, first_scoring_query in starts:
        end = start + num_tokens
        num_pages = -(-end // shape.block_size)
        table = torch.zeros(9, dtype=torch.int32)
        table[:num_pages] = torch.arange(owned, owned + num_pages)
        tokens = slice(token, token + num_tokens)
        num_survivors, recent_start = (end // 2 + 3, end - 5) if packs else (0, 0)
        if by_page:
            whole, rest = divmod(end, shape.block_size)
            num_survivors = min(whole, max(whole // 2, 2)) * shape.block_size + rest
        chunks.append(
            PromptChunk(
                tokens=tokens,
                block_table=table,
                resident_start=start,
                logical_start=start,
                num_survivors=num_survivors,
                recent_start=recent_start,
                num_sinks=2,
                first_scoring_query=first_scoring_query,
            )
        )
        owned, token = owned + num_pages, token + num_tokens + 1
    return chunks, owned
