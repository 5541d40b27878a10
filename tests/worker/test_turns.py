# SPDX-License-Identifier: Apache-2.0
"""What requests continue from is copied in every layer, and read before anything is written."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tests.kernels.caches import Shape, filled
from vllm_h2o.kernels.cache import LayerCache, cache_rows
from vllm_h2o.wire import Continuation, ResidencyPlan, Saved
from vllm_h2o.worker.after_step import Layers
from vllm_h2o.worker.turns import Turns

SHAPE = Shape(num_kv_heads=2, group=1, head_size=32, block_size=4)


def positions(cache: LayerCache, blocks: tuple[int, ...], num: int) -> list[list[int]]:
    """Of each KV head."""
    rows = cache_rows(torch.tensor(blocks), 2)
    return cache.position[rows].flatten(1)[:, :num].tolist()


def two_layers() -> tuple[list[LayerCache], Layers]:
    """Two layers' pages, and another layer."""
    caches = [filled(SHAPE, 10, seed) for seed in (1, 2)]
    for cache in caches:
        cache.position.copy_(torch.arange(80).view(10, 4, 2).mT.reshape(20, 4))
    context = {
        f"layer {index}": SimpleNamespace(
            kv_cache=cache, impl=SimpleNamespace(cache_of=lambda cache: cache)
        )
        for index, cache in enumerate(caches)
    }
    return caches, Layers([*context], {**context, "other": None})


def begin(
    turns: Turns,
    layers: Layers,
    *continued: Continuation,
    saved: tuple[Saved, ...] = (),
    dropped: tuple[int, ...] = (),
) -> None:
    """Begin a step."""
    by_id = {f"r{index}": each for index, each in enumerate(continued)}
    plan = ResidencyPlan({}, continued=by_id, saved=saved, dropped=dropped)
    turns.begin(plan, layers, torch.device("cpu"))


def test_two_begin_and_one_takes_the_other_s_pages() -> None:
    """In both layers."""
    (caches, layers), turns = two_layers(), Turns()
    before = [cache.position.clone() for cache in caches]
    begin(turns, layers)
    assert all(torch.equal(cache.position, old) for cache, old in zip(caches, before, strict=True))
    one = [sorted(held) for held in positions(caches[0], (2, 3), 7)]
    two = [sorted(held) for held in positions(caches[0], (5, 6), 6)]
    begin(
        turns,
        layers,
        Continuation(source=(2, 3), blocks=(5, 1), num_slots=7),
        Continuation(source=(5, 6), blocks=(3, 8), num_slots=6),
    )
    for cache in caches:
        assert positions(cache, (5, 1), 7) == one
        assert positions(cache, (3, 8), 6) == two


def content(cache: LayerCache, blocks: tuple[int, ...], num: int) -> list[torch.Tensor]:
    """K, V, score and position of each KV head's first slots."""
    rows = cache_rows(torch.tensor(blocks), 2)
    views = (cache.key, cache.value, cache.score, cache.position)
    return [view[rows].flatten(1, 2)[:, :num].clone() for view in views]


def test_copy_in_host_memory_is_what_a_copy_of_pages_is() -> None:
    """Bit for bit, in the step that saves it and later, after its pages are overwritten."""
    (caches, layers), turns = two_layers(), Turns()
    begin(turns, layers, Continuation((2, 3), (7, 8), 7))
    expected = [content(cache, (7, 8), 7) for cache in caches]
    saved = Saved(4, (2, 3))
    begin(turns, layers, Continuation((), (3, 2), 7, place=4), saved=(saved,))
    found = [[content(cache, (3, 2), 7) for cache in caches]]
    for cache in caches:
        cache.key.zero_(), cache.value.zero_(), cache.score.zero_(), cache.position.zero_()
    begin(turns, layers, Continuation((), (0, 9), 7, place=4), dropped=(4,))
    found.append([content(cache, (0, 9), 7) for cache in caches])
    for layer, each in enumerate(expected):
        for copy in found:
            assert all(map(torch.equal, each, copy[layer]))
    assert turns.host == {}
