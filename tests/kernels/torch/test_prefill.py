# SPDX-License-Identifier: Apache-2.0
"""Prompts on the CPU: ties at the end, and tiles of queries."""

from __future__ import annotations

import random

import pytest
import torch

from tests.kernels.harness import Shape, empty_cache
from vllm_h2o.kernels.batch import PromptChunk
from vllm_h2o.kernels.cache import LayerCache, cache_rows
from vllm_h2o.kernels.reference import pack_survivors
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.kernels.torch import pack, prefill
from vllm_h2o.policy import Budget

SHAPE = Shape(num_kv_heads=2, group=2, head_size=64, block_size=16)
VIEWS = ("key", "value", "score", "position")


def make_chunk(blocks: list[int], start: int, num_new: int, **limits: int) -> PromptChunk:
    """A chunk after ``start`` slots of a request with these pages."""
    return PromptChunk(
        tokens=slice(7, 7 + num_new),
        block_table=torch.tensor(blocks, dtype=torch.int32),
        resident_start=start,
        **{"logical_start": start, **limits},
    )


def full_page(num_blocks: int, blocks: list[int], num_tokens: int) -> LayerCache:
    """Pages of NaN but for one request's tokens, in order of position."""
    cache = LayerCache.of(empty_cache(SHAPE, num_blocks), SHAPE.head_size)
    chunk = make_chunk(blocks, 0, num_tokens)
    key, value = torch.randn(2, num_tokens, 2, 64)
    prefill.store(cache, chunk, key, value)
    prefill.add_to_scores(cache, chunk, torch.rand(2, num_tokens))
    return cache


def strips(cache: LayerCache, chunk: PromptChunk, num_slots: int) -> list[Strip]:
    """The strip of each head's first slots."""
    views = [
        getattr(cache, name)[cache_rows(chunk.block_table, 2)].flatten(1, 2)[:, :num_slots]
        for name in VIEWS
    ]
    return [Strip(*(view[h].clone() for view in views)) for h in range(2)]


@pytest.mark.parametrize("seed", range(20))
def test_survivors_among_ties_equal_the_reference(seed: int) -> None:
    """Among few different scores the survivors, and their order, are the reference's exactly."""
    rng = random.Random(seed)
    blocks, num_tokens, num_kept = [5, 2, 8, 1], rng.choice([33, 50, 64]), 31
    num_recent, num_sinks = rng.choice([(16, 0), (0, 0), (31, 0), (10, 4), (0, 31)])
    cache = full_page(9, blocks, num_tokens)
    levels = torch.tensor([rng.choice([0.0, 0.5, 1.0]) for _ in range(9 * 2 * 16)])
    cache.score.copy_(levels.view(18, 16))
    limits = {"recent_start": num_tokens - num_recent, "num_sinks": num_sinks}
    chunk = make_chunk(blocks, num_tokens - 5, 5, num_survivors=num_kept, **limits)
    before = strips(cache, chunk, num_tokens)
    outside = cache.key[[0, 1, 6, 7, 8, 9, 12, 13, 14, 15]].clone()
    pack.pack_survivors(cache, chunk)
    for packed, whole in zip(strips(cache, chunk, num_kept), before, strict=True):
        heavy = num_kept - num_recent - num_sinks
        budget = Budget(num_kept + 1, heavy, num_recent, num_sinks)
        expected = pack_survivors(whole, num_tokens, budget)
        for name in VIEWS:
            assert torch.equal(getattr(packed, name), getattr(expected, name)), name
    assert outside.isnan().all()
    assert cache.key[[0, 1, 6, 7, 8, 9, 12, 13, 14, 15]].isnan().all()


@pytest.mark.parametrize("power", [0, 1, 2])
def test_tiles_do_not_matter(monkeypatch: pytest.MonkeyPatch, power: int) -> None:
    """Tiles of any size, whole or with a rest, give the same outputs and scores."""
    results = []
    for tile in (1, 7, 30, prefill.QUERY_TILE):
        monkeypatch.setattr(prefill, "QUERY_TILE", tile)
        torch.manual_seed(0)
        cache = full_page(5, [4, 1, 3], 41)
        chunk = make_chunk([4, 1, 3], 11, 30)
        query = torch.randn(30, 4, 64)
        output = prefill.attend_and_score(cache, chunk, query, 0.2, power)
        results.append((output, strips(cache, chunk, 41)))
    for output, held in results[:-1]:
        torch.testing.assert_close(output, results[-1][0], rtol=1e-5, atol=1e-6)
        for one, other in zip(held, results[-1][1], strict=True):
            torch.testing.assert_close(one.score, other.score, rtol=1e-5, atol=1e-6)


def test_later_slots_are_not_read() -> None:
    """Slots after the chunk, in its last page too, reach neither outputs nor scores."""
    results = []
    for junk in (0.0, torch.nan, torch.inf):
        torch.manual_seed(0)
        cache = full_page(5, [4, 1, 3], 41)
        for view in (cache.key, cache.value, cache.score):
            view[3 * 2 : 4 * 2, 9:] = junk
        chunk = make_chunk([4, 1, 3], 0, 41, num_survivors=31, recent_start=31)
        output = prefill.attend_and_score(cache, chunk, torch.randn(41, 4, 64), 0.2, 1)
        pack.pack_survivors(cache, chunk)
        results.append((output, [strip.score for strip in strips(cache, chunk, 31)]))
    for output, scores in results[1:]:
        assert torch.equal(output, results[0][0])
        assert all(torch.equal(*pair) for pair in zip(scores, results[0][1], strict=True))


def test_store_starts_after_the_resident() -> None:
    """A chunk fills its own slots across pages, with positions from its first; nothing else."""
    cache = full_page(5, [4, 1, 3], 14)
    chunk = make_chunk([4, 1, 3], 14, 20, logical_start=100)
    before = strips(cache, chunk, 14)
    prefill.store(cache, chunk, torch.ones(20, 2, 64), torch.ones(20, 2, 64) * 2)
    for now, then in zip(strips(cache, chunk, 48), before, strict=True):
        assert now.position[14:34].tolist() == list(range(100, 120))
        assert (now.key[14:34] == 1).all() and (now.value[14:34] == 2).all()
        assert (now.score[14:34] == 0).all() and now.score[34:].isnan().all()
        assert all(torch.equal(getattr(now, n)[:14], getattr(then, n)) for n in VIEWS)
    others = torch.tensor([0, 1, 4, 5])
    assert cache.key[others].isnan().all() and cache.score[others].isnan().all()
