# SPDX-License-Identifier: Apache-2.0
"""Time the Triton kernels on a device: decode, prompts, the terms of a ranking, and survivors."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.kernels import (
    ROTATED,
    WINDOW,
    Size,
    asked,
    chunk_of,
    filled,
    full_batch,
    make,
    step_tensors,
)
from vllm_h2o.kernels.batch import Scoring
from vllm_h2o.kernels.triton.kernels import PromptAttention
from vllm_h2o.policy import Term

SIZES = tuple(
    Size(requests, tokens, 32, num_kv_heads, 128, 16, torch.bfloat16)
    for num_kv_heads in (8, 32)
    for requests, tokens in ((64, 2048), (8, 2048), (256, 512), (1, 8192), (8, 8192))
)
"""Sizes that are timed: batches and slots as :mod:`benchmarks.gpu.roofline` predicts them."""
PREDICTED = ("decode_ms", "decode_of_copy", "decode_scoring_adds", "prompt_scoring_adds")
"""Figures that it predicts."""


def seconds(action: Callable[[], Any], repeats: int = 20, captured: bool = True) -> float:
    """Median time of one call on the device: of a captured graph, so that Python's is left out."""
    for _ in range(3):
        action()
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            action()
        action = graph.replay
    spans = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        action()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end) / 1000)
    return statistics.median(spans)


def speed(size: Size, device: torch.device, attention: PromptAttention | None) -> dict[str, float]:
    """Decode against the device's copy; what scores, victims and survivors add."""
    cache = filled(size, device)
    victims = torch.zeros(cache.num_blocks, size.num_kv_heads, dtype=torch.int32, device=device)
    step, kernels = step_tensors(size, size.requests, device), make(size, device, attention)
    source = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / seconds(lambda: target.copy_(source))

    def decode(power: int, evicts: int) -> float:
        batch, scoring = full_batch(size, device, evicts), Scoring(power=power)
        return seconds(lambda: kernels.decode(cache, batch, victims, step, scoring))

    scored, plain = decode(1, 1), decode(0, 0)
    slots = size.requests * size.tokens * size.num_kv_heads
    moved = slots * (2 * size.head_size * size.dtype.itemsize + 8)  # K, V, score and position
    chunk = [chunk_of(size, 0, slice(0, size.tokens), 0, device)]
    long = step_tensors(size, size.tokens, device)

    def prompt(power: int) -> float:
        return seconds(lambda: kernels.prefill(cache, chunk, long, Scoring(power=power)))

    def score_term(term: Term) -> float:
        seen = asked(size, chunk, term)
        return seconds(lambda: kernels.score_term(cache, seen, long, term, by_age=True))

    full, bare = prompt(1), prompt(0)
    # Its fields are sent by every call, so that it is not captured.
    packed = seconds(lambda: kernels.pack_survivors([cache], chunk, Scoring()), captured=False)
    return {
        "copy_GB_per_s": copy / 1e9,
        "decode_GB": moved / 1e9,
        "decode_GB_per_s": moved / scored / 1e9,
        "decode_of_copy": moved / scored / copy,
        "decode_ms": scored * 1e3,
        "decode_scoring_adds": scored / plain - 1,
        "prompt_ms": full * 1e3,
        "prompt_scoring_adds": full / bare - 1,
        "prompt_rotated_adds": score_term(ROTATED) / bare,
        "prompt_window_adds": score_term(WINDOW) / bare,
        "pack_ms": packed * 1e3,
    }
