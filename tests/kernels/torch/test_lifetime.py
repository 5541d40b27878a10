"""Scores without the observation window: kept, moved with survivors, and put back."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.harness import Shape, empty_cache
from vllm_h2o.kernels.batch import PromptChunk, Scoring
from vllm_h2o.kernels.cache import LayerCache, cache_rows
from vllm_h2o.kernels.torch import pack, prefill
from vllm_h2o.kernels.torch.lifetime import keep_scores, restore_scores

SHAPE = Shape(num_kv_heads=2, group=3, head_size=64, block_size=16)
BLOCKS, LENGTH = [5, 2, 8, 1], 57


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("merges", [False, True])
def test_a_prompt(splits: bool, merges: bool) -> None:
    """Each survivor's own score, in every head; only the prompt's tokens get it."""
    torch.manual_seed(5)
    empty = empty_cache(SHAPE, 12, 1 + merges)
    cache = LayerCache.of(empty, SHAPE.head_size, splits, merges, keeps_scores=True)
    chunk = PromptChunk(
        tokens=slice(0, LENGTH),
        block_table=torch.tensor(BLOCKS, dtype=torch.int32),
        resident_start=0,
        logical_start=0,
        num_survivors=31,
        recent_start=LENGTH - 6,
        splits=splits,
    )
    prefill.store(cache, chunk, *torch.randn(2, LENGTH, 2, 64), None)
    plain, uneven = torch.rand(2, LENGTH), torch.tensor([[5.0], [500.0]])
    prefill.add_to_scores(cache, chunk, plain, Scoring())
    keep_scores(cache, chunk)
    prefill.add_to_scores(cache, chunk, uneven * torch.rand(2, LENGTH), Scoring())
    pack.pack_survivors(cache, chunk, Scoring(by_age=True))
    rows = cache_rows(torch.tensor(BLOCKS[:2]), 2)
    strips = cache.rows_of_split(torch.tensor(BLOCKS[:2])) if splits else [*rows]
    assert sorted(len(strip) for strip in strips) == ([1, 3] if splits else [2, 2])
    newest = strips[0][-1], 15
    cache.position[newest], cache.score[newest] = LENGTH, 7.0  # a token after the prompt
    restore_scores(cache, chunk.block_table[:2], torch.tensor([LENGTH] * 2))
    for head, strip in enumerate(strips):
        num_held = 16 * len(strip) - 1
        position = cache.position[strip].flatten()[:num_held].long()
        assert torch.equal(cache.score[strip].flatten()[:num_held], plain[head, position])
        assert position.tolist() == sorted({*position.tolist()})
    assert cache.score[newest] == 7.0
