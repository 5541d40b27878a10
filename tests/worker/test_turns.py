"""What requests continue from is copied in every layer, and read before anything is written."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tests.kernels.caches import Shape, filled
from vllm_h2o.kernels.cache import LayerCache, cache_rows
from vllm_h2o.wire import Continuation
from vllm_h2o.worker.turns import begin_turns

SHAPE = Shape(num_kv_heads=2, group=1, head_size=32, block_size=4)


def positions(cache: LayerCache, blocks: tuple[int, ...], num: int) -> list[list[int]]:
    """Of each KV head."""
    rows = cache_rows(torch.tensor(blocks), 2)
    return cache.position[rows].flatten(1)[:, :num].tolist()


def test_two_begin_and_one_takes_the_other_s_pages() -> None:
    """In both layers; of one two slots are free, of each KV head others."""
    caches = [filled(SHAPE, 10, seed) for seed in (1, 2)]
    for cache in caches:
        cache.position.copy_(torch.arange(80).view(10, 4, 2).mT.reshape(20, 4))
    victims = torch.zeros(10, 2, dtype=torch.int32)
    victims[5] = torch.tensor([0, 4])
    layers = {
        f"layer {index}": SimpleNamespace(
            kv_cache=cache, impl=SimpleNamespace(cache_of=lambda cache: cache, victims=victims)
        )
        for index, cache in enumerate(caches)
    }
    runner = SimpleNamespace(
        device=torch.device("cpu"),
        compilation_config=SimpleNamespace(static_forward_context={**layers, "other": None}),
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=list(layers))]
        ),
    )
    before = [cache.position.clone() for cache in caches]
    begin_turns((), runner)
    assert all(torch.equal(cache.position, old) for cache, old in zip(caches, before, strict=True))
    one = [sorted(held) for held in positions(caches[0], (2, 3), 7)]
    two = positions(caches[0], (5, 6), 8)
    left = [sorted([*two[0][:2], *two[0][4:]]), sorted([*two[1][:4], *two[1][4:6]])]
    begin_turns(
        (
            Continuation(source=(2, 3), blocks=(5, 1), num_slots=7),
            Continuation(source=(5, 6), blocks=(3, 8), num_slots=8, num_free_slots=2),
        ),
        runner,
    )
    for cache in caches:
        assert positions(cache, (5, 1), 7) == one
        assert positions(cache, (3, 8), 6) == left
