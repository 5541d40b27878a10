# SPDX-License-Identifier: Apache-2.0
"""A prompt's kernels, run on a few pages of their own before a request waits for a compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from vllm_h2o.kernels.batch import PromptChunk, Scoring, StepTensors
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.policy import Term


def rehearse(
    kernels: Kernels,
    cache: LayerCache,
    step: StepTensors,
    scoring: Scoring,
    terms: Sequence[Term],
    shares_pages: bool = False,
) -> None:
    """Run all that prompts will need.

    Args:
        kernels: whose.
        cache: a layer's; its shape and its kinds are taken, its pages left alone.
        step: any; its dtypes and heads are taken, and its attention sinks.
        scoring: the policy's.
        terms: that are added when prompts are stored.
        shares_pages: whether survivors may have to leave pages that others read.

    """
    device, num_kv_heads, head_size = cache.key.device, cache.num_kv_heads, cache.key.shape[-1]
    own, splits = _pages_like(cache), cache.first_rows is not None
    key = torch.zeros(2, num_kv_heads, head_size, dtype=step.key.dtype, device=device)
    query = key.repeat(1, step.query.shape[1] // num_kv_heads, 1)
    chunk = PromptChunk(
        tokens=slice(0, 2),
        block_table=torch.arange(2, dtype=torch.int32, device=device),
        resident_start=0,
        logical_start=0,
        num_survivors=1,
        recent_start=1,
    )
    step = replace(step, query=query, key=key, value=key, out=query.clone(), layer_index=0)
    # FlashAttention reads the keys of a later chunk from the pages: for some devices it compiles
    # another kernel then, when it is first asked for one.
    for start in (0, chunk.num_tokens):
        where = replace(chunk, resident_start=start, logical_start=start)
        kernels.prefill(own, [where], step, scoring)
    for term in terms:
        kernels.score_term(own, [chunk], step, term, scoring.by_age)
    kernels.pack_survivors([own], [chunk], scoring)
    whole = None
    if splits:
        size = cache.block_size
        whole = replace(
            chunk, resident_start=size, logical_start=size, num_survivors=size - 1, splits=True
        )
        kernels.pack_survivors([own.joined() if own.num_heads_of_all else own], [whole], scoring)
    if not shares_pages:
        return
    scores = torch.zeros(1, num_kv_heads, chunk.attended_len, device=device, dtype=torch.float32)
    apart = replace(chunk, window_scores=scores)
    for term in terms:
        if term.queries == "window":
            kernels.score_term(own, [apart], step, term, scoring.by_age)
    for packed in [chunk] if whole is None else [chunk, whole]:
        away = replace(packed, destination_blocks=chunk.block_table + 2)
        scores = torch.zeros(
            1, num_kv_heads, packed.attended_len, device=device, dtype=torch.float32
        )
        kernels.copy_survivors([own], away, scoring, scores)


def _pages_like(cache: LayerCache) -> LayerCache:
    """Four empty pages of the same kind."""
    content = cache.key.stride(0) // cache.block_size  # elements of a slot
    layout = (4, cache.rows_per_block, cache.block_size, content)
    blocks = torch.zeros(layout, dtype=cache.key.dtype, device=cache.key.device)
    kv_cache = blocks[:, cache.first_head : cache.first_head + cache.num_kv_heads]
    splits, merges = cache.first_rows is not None, cache.mass is not None
    kinds = (splits, merges, cache.score_without_window is not None)
    return LayerCache.of(kv_cache, cache.key.shape[-1], *kinds, scales=cache.scales)
