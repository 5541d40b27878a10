# SPDX-License-Identifier: Apache-2.0
"""What requests continue from is copied in every layer, and read before anything is written."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tests.kernels.caches import Shape, filled
from vllm_h2o.kernels.cache import LayerCache, cache_rows
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.wire import Continuation
from vllm_h2o.worker.after_step import Layers
from vllm_h2o.worker.turns import begin_turns

SHAPE = Shape(num_kv_heads=2, group=1, head_size=32, block_size=4)


def positions(cache: LayerCache, blocks: tuple[int, ...], num: int) -> list[list[int]]:
    """Of each KV head."""
    rows = cache_rows(torch.tensor(blocks), 2)
    return cache.position[rows].flatten(1)[:, :num].tolist()


def test_two_begin_and_one_takes_the_other_s_pages() -> None:
    """In both layers."""
    caches = [filled(SHAPE, 10, seed) for seed in (1, 2)]
    for cache in caches:
        cache.position.copy_(torch.arange(80).view(10, 4, 2).mT.reshape(20, 4))
    context = {
        f"layer {index}": SimpleNamespace(
            kv_cache=cache, impl=SimpleNamespace(cache_of=lambda cache: cache)
        )
        for index, cache in enumerate(caches)
    }
    layers = Layers([*context], {**context, "other": None})
    device, kernels = torch.device("cpu"), TorchKernels()
    before = [cache.position.clone() for cache in caches]
    begin_turns((), layers, kernels, device)
    assert all(torch.equal(cache.position, old) for cache, old in zip(caches, before, strict=True))
    one = [sorted(held) for held in positions(caches[0], (2, 3), 7)]
    two = [sorted(held) for held in positions(caches[0], (5, 6), 6)]
    begin_turns(
        (
            Continuation(source=(2, 3), blocks=(5, 1), num_slots=7),
            Continuation(source=(5, 6), blocks=(3, 8), num_slots=6),
        ),
        layers,
        kernels,
        device,
    )
    for cache in caches:
        assert positions(cache, (5, 1), 7) == one
        assert positions(cache, (3, 8), 6) == two
