# SPDX-License-Identifier: Apache-2.0
"""Survivors that are copied out of shared pages, and survivors by whole pages."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.kernels.torch.prompts import BLOCKS, LENGTH, NUM_SURVIVORS, VIEWS, shared, strips
from vllm_h2o.kernels.batch import Scoring
from vllm_h2o.kernels.cache import cache_rows
from vllm_h2o.kernels.reference import pack_survivors
from vllm_h2o.kernels.torch import pack
from vllm_h2o.policy import Budget


@pytest.mark.parametrize("has_own_scores", [False, True])
def test_survivors_are_copied(has_own_scores: bool) -> None:
    """They are those of a prompt packed in place; the pages they leave are not touched."""
    scores = torch.rand(2, LENGTH)
    destination = [7, 10]
    cache, chunk = shared(destination, 20)
    before = strips(cache, BLOCKS, LENGTH)
    pack.pack_survivors(cache, chunk, score=scores if has_own_scores else None)
    for head, (left, strip) in enumerate(zip(before, strips(cache, BLOCKS, LENGTH), strict=True)):
        assert all(torch.equal(getattr(left, name), getattr(strip, name)) for name in VIEWS)
        if has_own_scores:
            strip.score = scores[head].double()
        budget = Budget(NUM_SURVIVORS + 1, NUM_SURVIVORS - 15, 12, 3)
        expected = pack_survivors(strip, LENGTH, budget)
        copied = strips(cache, destination, NUM_SURVIVORS)[head]
        for name in VIEWS:
            assert torch.equal(getattr(copied, name), getattr(expected, name)), name
    others = [block for block in range(12) if block not in (*BLOCKS, *destination)]
    assert cache.key[cache_rows(torch.tensor(others), 2)].isnan().all()


@pytest.mark.parametrize("by_age", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_survivors_by_page(seed: int, by_age: bool) -> None:
    """Among few different sums the pages that survive are the reference's exactly, in order."""
    rng = random.Random(seed)
    recent, sinks = rng.choice([(0, 0), (16, 0), (9, 4), (20, 0), (0, 17)])
    length, slots = rng.choice([57, 60, 64]), Budget(48, 32 - recent - sinks, recent, sinks, 16, 16)
    cache, chunk = shared(None, length, length)
    chunk = replace(
        chunk,
        num_survivors=slots.survivors(length),
        recent_start=length - recent,
        num_sinks=sinks,
    )
    levels = torch.tensor([rng.choice([0.0, 1.0]) for _ in range(12 * 2 * 16)])
    cache.score.copy_(levels.view(24, 16))
    if by_age:  # ranks are zeros and ones again
        cache.score.mul_(length - cache.position)
    before = strips(cache, BLOCKS, length)
    pack.pack_survivors(cache, chunk, Scoring(by_age=by_age, by_page=True))
    for packed, whole in zip(strips(cache, BLOCKS, chunk.num_survivors), before, strict=True):
        expected = pack_survivors(whole, length, slots, by_age)
        for name in VIEWS:
            assert torch.equal(getattr(packed, name), getattr(expected, name)), name
