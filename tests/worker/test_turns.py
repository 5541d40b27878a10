# SPDX-License-Identifier: Apache-2.0
"""What requests continue from is copied in every layer, and read before anything is written."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

from tests.kernels.caches import Shape, filled
from vllm_h2o.kernels.cache import LayerCache, cache_rows
from vllm_h2o.scheduler.spec import HeavyHitterSpec
from vllm_h2o.wire import Continuation, ResidencyPlan, Saved
from vllm_h2o.worker.files import Writer
from vllm_h2o.worker.turns import States, Tokens, Turns, pages_of

SHAPE = Shape(num_kv_heads=2, group=1, head_size=32, block_size=4)


def positions(cache: LayerCache, blocks: tuple[int, ...], num: int) -> list[list[int]]:
    """Of each KV head."""
    rows = cache_rows(torch.tensor(blocks), 2)
    return cache.position[rows].flatten(1)[:, :num].tolist()


SPEC = HeavyHitterSpec.of(
    FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=32, dtype=torch.float32)
)
STATE = MambaSpec(block_size=64, shapes=((3,), (2, 5)), dtypes=(torch.float32, torch.bfloat16))


def layer_of(cache: LayerCache) -> SimpleNamespace:
    """A layer of the policy's, with these pages."""
    return SimpleNamespace(kv_cache=cache, impl=SimpleNamespace(cache_of=lambda cache: cache))


def two_layers() -> tuple[list[LayerCache], list[Tokens | States]]:
    """Two layers' pages, and another layer."""
    caches = [filled(SHAPE, 10, seed) for seed in (1, 2)]
    for cache in caches:
        cache.position.copy_(torch.arange(80).view(10, 4, 2).mT.reshape(20, 4))
    context = {f"layer {index}": layer_of(cache) for index, cache in enumerate(caches)}
    groups = [KVCacheGroupSpec([*context], SPEC)]
    return caches, list(pages_of(groups, {**context, "other": None}))


def begin(
    turns: Turns,
    layers: list[Tokens | States],
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
    (caches, layers), turns = two_layers(), Turns(Writer(0, 1))
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
    (caches, layers), turns = two_layers(), Turns(Writer(0, 1))
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


@torch.inference_mode()
def test_slots_after_a_copy_are_zeros() -> None:
    """In pages that held a state, which as K or V is no number."""
    (caches, layers), turns = two_layers(), Turns(Writer(0, 1))
    for cache in caches:
        rows = cache_rows(torch.tensor((7, 8)), 2)
        cache.key[rows] = cache.value[rows] = torch.nan
    begin(turns, layers, Continuation((2, 3), (7, 8), 6))
    for cache in caches:
        key, value, *_ = content(cache, (7, 8), 8)
        assert torch.isfinite(key).all() and torch.isfinite(value).all()
        assert not key[:, 6:].any() and not value[:, 6:].any() and key[:, :6].all()


def test_layers_of_several_shapes_are_copied() -> None:
    """VLLM has one group for them, and a spec of each layer."""
    caches, _ = two_layers()
    context = {str(index): layer_of(cache) for index, cache in enumerate(caches)}
    other = replace(SPEC, num_kv_heads=4)
    specs = UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs={"0": SPEC, "1": other})
    layers = list(pages_of([KVCacheGroupSpec([*context], specs)], context))
    assert [layer.cache for layer in layers] == caches


def test_states_go_where_their_groups_say() -> None:
    """Of two groups, one before and one after the policy's: from pages, and from host memory."""
    caches, _ = two_layers()
    names = ["state 0", "state 1", "state 2"]
    parts = [
        (torch.randn(10, 3), torch.randn(10, 2, 5, dtype=torch.bfloat16)) for _ in range(len(names))
    ]
    context = {
        name: SimpleNamespace(kv_cache=each) for name, each in zip(names, parts, strict=True)
    }
    context["own"] = layer_of(caches[0])
    groups = [
        KVCacheGroupSpec(names[:1], STATE),
        KVCacheGroupSpec(["own"], SPEC),
        KVCacheGroupSpec(names[1:], STATE),
    ]
    layers, turns = list(pages_of(groups, context)), Turns(Writer(0, 1))
    before = [[part.clone() for part in each] for each in parts]
    saved = Saved(1, source := (2, 3, 4, 5))
    begin(turns, layers, Continuation(source, (6, 7, 8, 9), 7), saved=(saved,))
    begin(turns, layers, Continuation((), (5, 1, 0, 2), 7, place=1))
    one, two = (content(caches[0], blocks, 7) for blocks in ((6, 7), (5, 1)))
    assert all(map(torch.equal, one, two))
    copied = {8: 4, 0: 4}, {9: 5, 2: 5}, {9: 5, 2: 5}
    for each, was, source_of in zip(parts, before, copied, strict=True):
        for part, old in zip(each, was, strict=True):
            expected = old[[source_of.get(n, n) for n in range(len(old))]]
            assert torch.equal(part, expected)
