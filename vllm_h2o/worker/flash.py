# SPDX-License-Identifier: Apache-2.0
"""Prompts attended by vLLM's FlashAttention, which keeps the log-sum-exp that scores need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import ReferenceType, ref

import torch

from vllm_h2o.kernels.batch import PromptChunk, StepTensors
from vllm_h2o.kernels.cache import LayerCache


@dataclass(frozen=True)
class Run:
    """Chunks whose tokens follow one another in the step's tensors.

    Args:
        tokens: rows of all of them.
        bounds: [R + 1], int32: where each begins, from 0.
        lengths: [R], int32: slots that each attends to at its end; None where none had any before.
        block_table: [R, P], int32; None where ``lengths`` is.
        longest_query: tokens of the longest chunk.
        longest_key: slots of the longest request.

    """

    tokens: slice
    bounds: torch.Tensor
    lengths: torch.Tensor | None
    block_table: torch.Tensor | None
    longest_query: int
    longest_key: int


def runs_of(chunks: Sequence[PromptChunk], device: torch.device) -> list[Run]:
    """Group the chunks of a step."""
    ordered = sorted(chunks, key=lambda chunk: chunk.tokens.start)
    cuts = [i + 1 for i, (a, b) in enumerate(pairwise(ordered)) if a.tokens.stop != b.tokens.start]
    groups = [ordered[i:j] for i, j in pairwise([0, *cuts, len(ordered)])]
    return [_run(group, device) for group in groups]


def _run(group: list[PromptChunk], device: torch.device) -> Run:
    start = group[0].tokens.start
    fresh = all(chunk.resident_start == 0 for chunk in group)
    bounds = [0, *[chunk.tokens.stop - start for chunk in group]]
    rows = bounds + ([] if fresh else [chunk.attended_len for chunk in group])
    host = torch.tensor(rows, dtype=torch.int32, pin_memory=device.type == "cuda")
    sent = host.to(device, non_blocking=True)
    return Run(
        tokens=slice(start, group[-1].tokens.stop),
        bounds=sent[: len(bounds)],
        lengths=None if fresh else sent[len(bounds) :],
        block_table=None if fresh else torch.stack([chunk.block_table for chunk in group]),
        longest_query=max(chunk.num_tokens for chunk in group),
        longest_key=max(chunk.attended_len for chunk in group),
    )


class FlashPrompt:
    """Attends chunks of prompts; keys come from the step where a chunk is a prompt's first.

    Args:
        function: vLLM's ``flash_attn_varlen_func``.
        version: of FlashAttention.

    """

    def __init__(self, function: Callable[..., Any], version: int) -> None:
        self.function, self.version = function, version
        # Not held: of a prompt that ends, chunks hold the scores of every layer.
        self._source: ReferenceType[PromptChunk] | None = None
        self._runs: list[Run] = []

    def __call__(
        self, cache: LayerCache, chunks: Sequence[PromptChunk], tensors: StepTensors
    ) -> torch.Tensor:
        """Attend, and return each query's log-sum-exp, [Hq, T] float32. ``out`` is written."""
        query = tensors.query
        if self._source is None or self._source() is not chunks[0]:
            self._source, self._runs = ref(chunks[0]), runs_of(chunks, query.device)
        parts = [self._attend(cache, run, tensors) for run in self._runs]
        if len(parts) == 1 and self._runs[0].tokens == slice(0, query.shape[0]):
            return parts[0]
        lse = torch.empty(query.shape[1], query.shape[0], device=query.device, dtype=torch.float32)
        for run, part in zip(self._runs, parts, strict=True):
            lse[:, run.tokens] = part
        return lse

    def _attend(self, cache: LayerCache, run: Run, tensors: StepTensors) -> torch.Tensor:
        if run.block_table is None:
            source: dict[str, Any] = {"cu_seqlens_k": run.bounds}
            key, value = tensors.key[run.tokens], tensors.value[run.tokens]
        else:
            source = {"seqused_k": run.lengths, "block_table": run.block_table}
            key, value = (_paged(cache, view) for view in (cache.key, cache.value))
        _, lse = self.function(
            q=tensors.query[run.tokens],
            k=key,
            v=value,
            out=tensors.out[run.tokens],
            cu_seqlens_q=run.bounds,
            max_seqlen_q=run.longest_query,
            max_seqlen_k=run.longest_key,
            softmax_scale=tensors.scale,
            causal=True,
            return_softmax_lse=True,
            fa_version=self.version,
            **source,
        )
        return lse


def _paged(cache: LayerCache, view: torch.Tensor) -> torch.Tensor:
    """[R, N, D] -> [num_blocks, N, H, D], as FlashAttention takes a paged cache. No copy."""
    own = slice(cache.first_head, cache.first_head + cache.num_kv_heads)
    return view.unflatten(0, (-1, cache.rows_per_block))[:, own].transpose(1, 2)
