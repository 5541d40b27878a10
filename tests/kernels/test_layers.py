# SPDX-License-Identifier: Apache-2.0
"""Layers that share slots: the survivors of a prompt, among the KV heads of all of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tests.kernels.decodes import KERNELS, slow_on_triton
from tests.kernels.harness import LAYER_NAME, Shape, empty_cache
from vllm_h2o.kernels.batch import PromptChunk, Scoring
from vllm_h2o.kernels.cache import SHARED_TENTHS_OF_ALL, LayerCache
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.kernels.reference import Head, pack_survivors
from vllm_h2o.kernels.split import pack_layer
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.policy import Budget
from vllm_h2o.worker.after_step import Layers, Packing

SHAPE = Shape(num_kv_heads=3, group=2, head_size=16, block_size=8, num_layers=22)
LENGTH, CAPACITY, NUM_RECENT, NUM_SINKS = 44, 16, 4, 1
TABLES = torch.tensor([[5, 2, 8, 1, 11, 3], [9, 4, 7, 10, 6, 12]], dtype=torch.int32)
VIEWS = ("key", "value", "score", "position", "score_without_window")


def layers() -> list[LayerCache]:
    """Layers of one buffer, with two prompts in it."""
    buffer = empty_cache(SHAPE, 13, extra_words=2)
    own = [buffer[:, SHAPE.heads(layer)] for layer in range(SHAPE.num_layers)]
    caches = [LayerCache.of(kv_cache, SHAPE.head_size, True, True, True) for kv_cache in own]
    every = caches[0]
    assert every.mass is not None and every.score_without_window is not None
    every.mass.fill_(1.0)
    every.score_without_window.copy_(torch.rand(every.score.shape))
    for view in (every.key, every.value):
        view.copy_(torch.randn(view.shape))
    # Heads are unlike, with many equal scores.
    factors = torch.arange(1, 1 + SHAPE.num_heads_of_all) % 13
    scores = torch.randint(0, 9, (13, SHAPE.num_heads_of_all, 8)) * factors[:, None]
    every.score.copy_(scores.flatten(0, 1))
    for table in TABLES.long():
        for cache in caches:
            cache.position[cache.rows(table)] = torch.arange(48, dtype=torch.int32).view(6, 8)
    return caches


def chunk(table: torch.Tensor, splits: bool) -> PromptChunk:
    """The last token of a prompt."""
    return PromptChunk(
        tokens=slice(0, 1),
        block_table=table,
        resident_start=LENGTH - 1,
        logical_start=LENGTH - 1,
        num_survivors=CAPACITY - 1,
        recent_start=LENGTH - NUM_RECENT,
        num_sinks=NUM_SINKS,
        splits=splits,
    )


def strip_of(cache: LayerCache, rows: torch.Tensor, length: int) -> Strip:
    """The strip of a KV head."""
    key, value, score, position, without = (
        getattr(cache, view)[rows].flatten(0, 1)[:length] for view in VIEWS
    )
    own = {"score_without_window": without, "keeps_scores": True}
    return Strip(key, value, score.double(), position.long(), **own)


def held(caches: list[LayerCache], table: torch.Tensor, length: int) -> list[Strip]:
    """By each KV head, layer by layer, where they do not share slots."""
    return [strip_of(cache, rows, length) for cache in caches for rows in cache.rows(table)]


@slow_on_triton({"torch": lambda _: TorchKernels(), **KERNELS})
def test_survivors_of_all_layers_equal_the_reference(make: Callable[[Shape], Kernels]) -> None:
    """The reference's, of a prompt whose heads share slots and of one whose heads do not."""
    torch.manual_seed(3)
    caches = layers()
    sharing, apart = (held(caches, table, LENGTH) for table in TABLES)
    budget = Budget(CAPACITY, CAPACITY - 1 - NUM_RECENT - NUM_SINKS, NUM_RECENT, NUM_SINKS)
    heads = [Head(strip, budget, splits=True, logical_len=LENGTH) for strip in sharing]
    pack_layer(heads, SHAPE.block_size, SHARED_TENTHS_OF_ALL)
    expected = [head.strip for head in heads] + [pack_survivors(s, LENGTH, budget) for s in apart]
    chunks = [chunk(TABLES[0], splits=True), chunk(TABLES[1], splits=False)]
    names = [f"{LAYER_NAME}.{index}" for index in range(len(caches))]
    Packing(chunks, Layers(names, bound(names, caches)), make(SHAPE), Scoring()).run()
    rows = [own for cache in caches for own in cache.rows_of_split(TABLES[0, :2])]
    found = [strip_of(caches[0], own, len(own) * 8 - 1) for own in rows]
    found += held(caches, TABLES[1, :2], CAPACITY - 1)
    assert len({len(strip) for strip in found}) > 2
    assert sum(map(len, rows)) == 2 * SHAPE.num_heads_of_all
    for ours, theirs in zip(found, expected, strict=True):
        for view in VIEWS:
            assert torch.equal(getattr(ours, view), getattr(theirs, view)), view


def bound(names: list[str], caches: list[LayerCache]) -> dict[str, Any]:
    """vLLM's layers, by name."""

    def layer(cache: LayerCache) -> Any:
        return SimpleNamespace(impl=SimpleNamespace(cache_of=lambda _: cache), kv_cache=None)

    return {name: layer(cache) for name, cache in zip(names, caches, strict=True)}
