# SPDX-License-Identifier: Apache-2.0
"""The native kernels in whole lives of requests, each variant."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given

from tests.draws import drawn
from tests.kernels.harness import Layer, Life, Shape
from tests.kernels.lives import LIVES, MERGES, TABLE, cases, make_lives, merging, pool_size
from tests.kernels.native.cases import Pool, decode_batch
from tests.kernels.truth import OUTPUT_ATOL, Count, live
from vllm_h2o.kernels.batch import Scoring
from vllm_h2o.kernels.native import loader
from vllm_h2o.kernels.native.kernels import NativeKernels

VARIANTS = loader.available()
EACH_VARIANT = [
    pytest.param(variant, marks=pytest.mark.slow if variant in VARIANTS[1:-1] else ())
    for variant in VARIANTS
]
"""The best and the portable one stand for the others, which are compiled from the same source."""
NEEDS_LIBRARY = pytest.mark.skipif(not VARIANTS, reason="no native library has been built")


@pytest.fixture(scope="module")
def count() -> Iterator[Count]:
    """Over all lives of this module, float32 may rank one selection in a thousand otherwise."""
    counted = Count()
    yield counted
    counted.check()


def output_atol(variant: str, dtype: torch.dtype) -> float:
    """Weights of a bfloat16 prompt are rounded to bfloat16 where the processor multiplies those."""
    rounded = dtype == torch.bfloat16 and variant in ("amx", "bf16")
    return 2e-2 if rounded else OUTPUT_ATOL


@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize(("name", "merge"), LIVES)
def test_requests_step_by_step_equal_the_reference(
    name: str, merge: float, variant: str, count: Count
) -> None:
    """Retained tokens, scores, K, V, outputs and writes are the reference's after every step."""
    policy, shape, rows = TABLE[name]
    lives = make_lives(rows)
    num_blocks = pool_size(lives, shape.block_size, share=0.7)
    options = merging(merge, shape)
    layer = Layer(shape, policy, num_blocks, kernels=loader.load(variant), options=options)
    live(layer, lives, count, output_atol=output_atol(variant, shape.dtype))


@NEEDS_LIBRARY
@drawn(60)
@given(case=cases(), merge=MERGES)
def test_drawn_requests_equal_the_reference(
    case: tuple[str, Shape, list[Life], float, int], merge: float, count: Count
) -> None:
    """The same for drawn shapes, policies, budgets, prompts, chunks and schedules."""
    policy, shape, lives, share, seed = case
    kernels = loader.load()
    num_blocks = pool_size(lives, shape.block_size, share)
    layer = Layer(shape, policy, num_blocks, seed, kernels=kernels, options=merging(merge, shape))
    atol = output_atol(kernels.variant, shape.dtype)
    live(layer, lives, count, output_atol=atol)


@NEEDS_LIBRARY
def test_victims_are_checked() -> None:
    """Victims that would be misread are refused."""
    pool = Pool(Shape(), [20])
    batch = decode_batch(pool.block_table, attended_len=[20], logical_start=[19])
    kernels = loader.load()
    assert isinstance(kernels, NativeKernels)
    for victims in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int32).T):
        with pytest.raises(ValueError, match="victims of torch"):
            kernels.decode(pool.cache, batch, victims, pool.tensors(1), Scoring())
    with pytest.raises(ValueError, match="merged in pages that hold no masses"):
        victims = torch.zeros(3, 2, dtype=torch.int32)
        kernels.decode(pool.cache, batch, victims, pool.tensors(1), Scoring(merge=0.9))
