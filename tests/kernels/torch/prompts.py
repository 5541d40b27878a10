# SPDX-License-Identifier: Apache-2.0
"""A prompt in pages of its own, and its strips."""

from __future__ import annotations

import torch

from tests.kernels.harness import Shape, empty_cache
from vllm_h2o.kernels.batch import PromptChunk
from vllm_h2o.kernels.cache import LayerCache, cache_rows
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.kernels.torch import prefill

SHAPE = Shape(num_kv_heads=2, group=3, head_size=64, block_size=16)
BLOCKS, LENGTH, NUM_SURVIVORS = [5, 2, 8, 1], 57, 31
VIEWS = ("key", "value", "score", "position")


def shared(
    destination: list[int] | None, num_tokens: int, length: int = LENGTH
) -> tuple[LayerCache, PromptChunk]:
    """A prompt in its pages, whose last chunk is to be packed."""
    torch.manual_seed(3)
    cache = LayerCache.of(empty_cache(SHAPE, 12), SHAPE.head_size)
    chunk = PromptChunk(
        tokens=slice(4, 4 + num_tokens),
        block_table=torch.tensor(BLOCKS, dtype=torch.int32),
        resident_start=length - num_tokens,
        logical_start=length - num_tokens,
        num_survivors=NUM_SURVIVORS,
        recent_start=length - 12,
        num_sinks=3,
        destination_blocks=(
            None if destination is None else torch.tensor(destination, dtype=torch.int32)
        ),
    )
    whole = PromptChunk(
        tokens=slice(0, length), block_table=chunk.block_table, resident_start=0, logical_start=0
    )
    key, value = torch.randn(2, length, 2, 64)
    prefill.store(cache, whole, key, value)
    return cache, chunk


def strips(cache: LayerCache, blocks: list[int], num_slots: int) -> list[Strip]:
    """The strip of each head in the first slots of some pages, in float64."""
    rows = cache_rows(torch.tensor(blocks), 2)
    views = [getattr(cache, name)[rows].flatten(1, 2)[:, :num_slots] for name in VIEWS]
    key, value, score, position = views
    return [
        Strip(key[h].double(), value[h].double(), score[h].double(), position[h].long())
        for h in range(2)
    ]
