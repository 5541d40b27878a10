# SPDX-License-Identifier: Apache-2.0
"""The kernels for GPUs in Triton's interpreter, against the reference after every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.harness import Layer, Shape
from tests.kernels.lives import (
    RANKINGS,
    SCALES,
    make_lives,
    merging,
    page_budget,
    pool_size,
    with_windows,
)
from tests.kernels.truth import OUTPUT_ATOL, Count, live
from vllm_h2o.kernels.triton import score
from vllm_h2o.kernels.triton.kernels import TritonKernels
from vllm_h2o.policy import policies

FP32, FP16 = torch.float32, torch.float16
TABLE = {
    # name: (policy, shape, [(capacity, recent, sinks, chunks, decodes), ...])
    "the paper's halves": (
        "h2o",
        Shape(2, 1, 64, 16, FP32),
        [(16, 8, 0, [40], 6), (32, 16, 0, [7, 30, 1], 6), (48, 24, 0, [20], 32)],
    ),
    "groups of three, float16": (
        "h2o",
        Shape(2, 3, 80, 16, FP16),
        [(16, 0, 0, [30], 9), (32, 0, 2, [31], 5), (16, 0, 4, [3], 16)],
    ),
    "groups of four, 96 wide": ("h2o", Shape(1, 4, 96, 32, FP32), [(32, 27, 4, [64, 1], 6)]),
    "groups of eight, 128 wide": ("h2o", Shape(1, 8, 128, 16, FP16), [(16, 7, 0, [5, 6, 70], 5)]),
    "one head of 256": ("h2o", Shape(1, 1, 256, 64, FP16), [(64, 14, 0, [70], 4)]),
    "pages of 128": ("h2o", Shape(2, 1, 64, 128, FP32), [(128, 64, 0, [131, 9], 4)]),
    "a page that is no power of two": ("h2o", Shape(1, 3, 64, 24, FP32), [(48, 20, 0, [60], 6)]),
    "streaming": ("streaming", Shape(2, 1, 64, 32, FP16), [(32, 27, 4, [64], 6)]),
    "float8 of float32": (
        "h2o",
        Shape(2, 3, 64, 16, FP32, torch.float8_e4m3fn, SCALES),
        [(16, 8, 0, [40], 6), (32, 16, 2, [7, 30, 1], 6)],
    ),
    "the other float8 of float16": (
        "h2o",
        Shape(1, 1, 80, 16, FP16, torch.float8_e5m2),
        [(16, 4, 0, [20], 9)],
    ),
    "nothing is ever full": ("full", Shape(2, 1, 64, 16, FP32), [(1024, 1023, 0, [30, 3], 4)]),
}


@pytest.fixture(scope="module")
def count() -> Iterator[Count]:
    """Over all lives of this module, float32 may rank one selection in a thousand otherwise."""
    counted = Count()
    yield counted
    counted.check()


def triton_kernels(shape: Shape) -> TritonKernels:
    """For a layer of the tests."""
    num_heads = shape.num_kv_heads * shape.group
    return TritonKernels(torch.device("cpu"), 16, num_heads, shape.num_kv_heads, shape.head_size)


@pytest.mark.parametrize("merge", [0.0, pytest.param(0.15, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TABLE)
def test_requests_step_by_step_equal_the_reference(name: str, merge: float, count: Count) -> None:
    """Retained tokens, scores, K, V, outputs and writes are the reference's after every step."""
    policy, shape, rows = TABLE[name]
    lives = make_lives(rows)
    num_blocks = pool_size(lives, shape.block_size, share=0.7)
    if merge and (shape.float8 or not policies()[policy].evicts):
        pytest.skip("nothing is merged")
    options = merging(merge)
    layer = Layer(shape, policy, num_blocks, kernels=triton_kernels(shape), options=options)
    before = count.num_selections
    # Matrix units take probabilities in the cache's own type.
    atol = OUTPUT_ATOL if shape.dtype == FP32 else 2e-3
    live(layer, lives, count, output_atol=atol)
    assert (count.num_selections > before) is policies()[policy].evicts


@pytest.mark.slow
@pytest.mark.parametrize("by_page", [False, True])
@pytest.mark.parametrize("ranking", RANKINGS)
def test_lives_of_each_ranking(ranking: str, by_page: bool, count: Count) -> None:
    """The same by every term and every reduction, where tokens are evicted or whole pages."""
    (policy, options), shape = RANKINGS[ranking], Shape(1, 3, 64, 16)
    lives = make_lives([(32, 8, 3, [50, 30], 8), (16, 4, 0, [21], 9)])
    if by_page:
        options = (*options, ("evict_every", "page"))
        budgets = page_budget(16, 2, 20, 3), page_budget(16, 1, 4, 0, every=2)
        steps = zip(lives, budgets, (17, 40), strict=True)
        lives = [replace(life, budget=own, num_decodes=num) for life, own, num in steps]
    num_blocks = pool_size(lives, shape.block_size, share=1.0)
    layer = Layer(shape, policy, num_blocks, kernels=triton_kernels(shape), options=options)
    live(layer, with_windows(lives), count)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["the paper's halves", "float8 of float32", "pages of 128"])
def test_lives_in_parts(name: str, count: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where many programs share the slots of a KV head, and the last chooses.

    Pages are parts, several parts of a program, or several parts themselves.
    """
    programs = many_programs(monkeypatch)
    policy, shape, rows = TABLE[name]
    lives = make_lives(rows)
    num_blocks = pool_size(lives, shape.block_size, share=0.7)
    layer = Layer(shape, policy, num_blocks, kernels=triton_kernels(shape))
    live(layer, lives, count, output_atol=OUTPUT_ATOL if shape.dtype == FP32 else 2e-3)
    assert max(programs) > 2 * len(lives)  # three of a request, at least


def many_programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Launches as a device with many multiprocessors has them, and tiles of 16 slots.

    Returns:
        How many programs score each KV head of all requests, launch by launch.

    """
    monkeypatch.setattr("vllm_h2o.kernels.triton.kernels.PROCESSORS", 64)
    for module in ("kernels", "sizes"):
        monkeypatch.setattr(f"vllm_h2o.kernels.triton.{module}.PAGE_LANES", 16)
    monkeypatch.setattr("vllm_h2o.kernels.triton.sizes.TILE", 16)
    launch, programs = score.merge_and_score, list[int]()

    class Counted:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            programs.append(grid[1])
            return launch[grid]

    monkeypatch.setattr(score, "merge_and_score", Counted())
    return programs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("merge", "in_parts", "num_layers"),
    [(0.0, False, 1), (0.15, False, 1), (0.15, True, 1), (0.15, False, 3)],
)
def test_lives_of_unequal_heads(
    merge: float, in_parts: bool, num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where KV heads share slots, of a layer or of all."""
    if in_parts:
        many_programs(monkeypatch)
    num_kv_heads = 3 if num_layers == 1 else 2
    shape, count = Shape(num_kv_heads, 3, 32, 8, FP32, num_layers=num_layers), Count()
    rows = [(48, 8, 0, [20, 60], 9), (40, 12, 3, [70], 9), (24, 8, 0, [9], 18)]
    lives = [replace(life, splits=True) for life in make_lives(rows)]
    split = ("split", "heads" if num_layers == 1 else "layers")
    options = (("score", "mean_squares"), split, *merging(merge))
    num_blocks = pool_size(lives, shape.block_size, share=1.0)
    layer = Layer(shape, "h2o", num_blocks, kernels=triton_kernels(shape), options=options)
    live(layer, lives, count)
    count.check()
    assert count.num_unequal > 0
    assert (count.num_merged > 0) is (merge > 0)
