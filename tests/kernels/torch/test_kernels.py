# SPDX-License-Identifier: Apache-2.0
"""The torch kernels, driven as the engine drives them, against the reference after every step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given

from tests.draws import drawn
from tests.kernels.harness import Layer, Life, Shape
from tests.kernels.lives import LIVES, MERGES, TABLE, cases, make_lives, merging, pool_size
from tests.kernels.truth import Count, live
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.policy import policies

TORCH = TorchKernels()


@pytest.fixture(scope="module")
def count() -> Iterator[Count]:
    """Over all lives of this module, float32 may rank one selection in a thousand otherwise."""
    counted = Count()
    yield counted
    counted.check()


@pytest.mark.parametrize(("name", "merge"), LIVES)
def test_requests_step_by_step_equal_the_reference(name: str, merge: float, count: Count) -> None:
    """Retained tokens, scores, K, V, outputs and writes are the reference's after every step."""
    policy, shape, rows = TABLE[name]
    lives = make_lives(rows)
    num_blocks = pool_size(lives, shape.block_size, share=0.7)
    layer = Layer(shape, policy, num_blocks, kernels=TORCH, options=merging(merge, shape))
    before = count.num_selections
    live(layer, lives, count)
    assert (count.num_selections > before) is policies()[policy].evicts


@drawn(60)
@given(case=cases(), merge=MERGES)
def test_drawn_requests_equal_the_reference(
    case: tuple[str, Shape, list[Life], float, int], merge: float, count: Count
) -> None:
    """The same for drawn shapes, policies, budgets, prompts, chunks and schedules."""
    policy, shape, lives, share, seed = case
    num_blocks = pool_size(lives, shape.block_size, share)
    layer = Layer(shape, policy, num_blocks, seed, kernels=TORCH, options=merging(merge, shape))
    live(layer, lives, count)
