# SPDX-License-Identifier: Apache-2.0
"""Victims that are merged into the nearest key: the definition by hand, and odd shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.kernels.caches import filled, on_triton
from tests.kernels.decodes import KERNELS, compare_decodes, decode_batch
from tests.kernels.harness import Shape
from tests.kernels.native.cases import threads
from vllm_h2o.kernels.batch import Scoring, StepTensors
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.kernels.merge import nearest
from vllm_h2o.kernels.reference import Head
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.policy import Budget, Ranking, Term

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def several_threads() -> Iterator[None]:
    """Strips are cut, so that the victim, its nearest key and others are of different threads."""
    with threads(3):
        yield


def strip_of(keys: list[list[float]]) -> Strip:
    """One slot for each key, with values that tell them apart."""
    key = torch.tensor(keys, dtype=torch.float64)
    number = torch.arange(len(keys))
    return Strip(key, torch.eye(len(keys)).double(), number.double() / 10, number)


def test_the_largest_cosine_above_the_threshold() -> None:
    """Not the largest product; a cosine at the threshold is not above it."""
    key = torch.tensor([[1.0, 0.0], [0.0, 1.0], [9.0, 9.0], [3.0, 4.0], [-1.0, 0.0]]).double()
    assert nearest(key, 0, 0.5) == 2
    assert nearest(key, 0, 0.71) is None
    assert nearest(key[[0, 3, 4]], 0, 0.6) is None
    assert nearest(key[[0, 3, 4]], 0, 0.59) == 1
    assert nearest(key[[4, 0, 1]], 0, 0.01) is None


def test_of_equal_cosines_the_lowest_slot() -> None:
    """And a key of zeros is near nothing."""
    key = torch.tensor([[0.0, 0.0], [2.0, 2.0], [0.5, 0.5], [1.0, 1.0]]).double()
    assert [nearest(key, slot, 0.9) for slot in range(4)] == [None, 2, 1, 1]


def test_means_are_weighted_by_mass() -> None:
    """The third victim of one token weighs a third of what it is merged with: nothing is lost."""
    strip = strip_of([[1.0, 0.0], [4.0, 0.0], [7.0, 0.0], [0.0, 5.0]])
    strip.merge(0, 1)
    strip.merge(0, 2)
    assert strip.mass.tolist() == [3, 1, 1, 1]
    torch.testing.assert_close(strip.key[0], torch.tensor([4.0, 0.0]).double())
    torch.testing.assert_close(strip.value[0], torch.tensor([1, 1, 1, 0]).double() / 3)
    assert strip.position.tolist() == [0, 1, 2, 3] and strip.score[0] == 0.0
    strip.store(1, strip.key[3], strip.value[3], 4)
    assert strip.mass.tolist() == [3, 1, 1, 1]
    strip.merge(1, 0)
    assert strip.mass.tolist() == [3, 4, 1, 1]
    torch.testing.assert_close(strip.key[1], torch.tensor([3.0, 1.25]).double())


def test_means_are_weighted_by_attention_where_scores_are_means() -> None:
    """The root of the mean square, of as many queries as each has met; masses add as always."""
    strip = strip_of([[1.0, 0.0], [4.0, 0.0], [7.0, 0.0], [0.0, 5.0]])
    strip.score = torch.tensor([1.0, 0.0, 8.0, 0.0]).double()
    # Ages are 4, 3, 2 and 1: root mean squares 1/2, 0, 2 and 0.
    strip.merge(0, 2, end=4, power=2)
    torch.testing.assert_close(strip.key[0], torch.tensor([1 + 6 * 0.8, 0.0]).double())
    torch.testing.assert_close(strip.value[0], torch.tensor([0.2, 0, 0.8, 0]).double())
    strip.merge(0, 1, end=4, power=2)
    strip.merge(3, 1, end=4, power=2)  # neither is paid any: the victim has no share
    torch.testing.assert_close(strip.key[0], torch.tensor([5.8, 0.0]).double())
    torch.testing.assert_close(strip.key[3], torch.tensor([0.0, 5.0]).double())
    assert strip.mass.tolist() == [3, 1, 1, 2] and strip.score.tolist() == [1, 0, 8, 0]


def test_the_power_of_a_mean_decides_its_root() -> None:
    """Of probabilities themselves, the mean."""
    strip = strip_of([[1.0, 0.0], [5.0, 0.0]])
    strip.score = torch.tensor([2.0, 3.0]).double()  # means 1 and 3
    strip.merge(0, 1, end=2, power=1)
    torch.testing.assert_close(strip.key[0], torch.tensor([4.0, 0.0]).double())


def test_a_merged_token_is_as_many_equal_ones() -> None:
    """Attention over equal keys does not change when they are merged: that is what masses do."""
    torch.manual_seed(0)
    query = torch.randn(1, 3, 8).double()
    key, value = torch.randn(2, 6, 8).double()
    key[4] = key[1]
    held = Strip(key, value, torch.zeros(6).double(), torch.arange(6))
    ranking = Ranking(Term("all", "sum"))
    whole = Head(held, Budget(99, 98, 0, 0), ranking, logical_len=6, in_prompt=False)
    held = held.taken(range(6))
    merging = Head(held, Budget(6, 5, 0, 0), ranking, merge=0.999, logical_len=6, in_prompt=False)
    merging.victim = 4
    new = torch.randn(2, 1, 8).double()
    torch.testing.assert_close(whole.step(query, *new), merging.step(query, *new))
    assert merging.strip.position.tolist() == [0, 1, 2, 3, 6, 5]
    assert merging.strip.mass.tolist() == [1, 2, 1, 1, 1, 1]
    # The one has the scores of both.
    both = whole.strip.score[1] + whole.strip.score[4]
    torch.testing.assert_close(merging.strip.score[1], both)


SHAPES = {
    "pages of 3": Shape(2, 3, 64, 3, FP32),
    "pages of 5": Shape(1, 4, 80, 5, FP32),
    "pages of 17, float16": Shape(3, 1, 96, 17, FP16),
    "heads of 256": Shape(1, 8, 256, 16, FP32),
    "heads of 16": Shape(2, 2, 16, 16, FP32),
    "bfloat16": Shape(3, 3, 64, 32, BF16),
    "pages of 128": Shape(2, 5, 32, 128, FP32),
}


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("name", SHAPES)
def test_merging_with_odd_shapes_equals_torch(make: Callable[[Shape], Kernels], name: str) -> None:
    """Outputs, pages and victims are those of torch."""
    shape, scoring = SHAPES[name], Scoring(merge=0.05)
    if make is on_triton and shape.dtype == BF16:
        pytest.skip("Triton's interpreter multiplies no matrices of bfloat16")
    batch, owned = decode_batch(shape)
    theirs = filled(shape, owned + 1, seed=2, merges=True)
    victims = torch.zeros(owned + 1, shape.num_kv_heads, dtype=torch.int32)
    for request, num_slots in ((2, 2), (5, 9)):
        slots = torch.arange(shape.num_kv_heads) * 5 + 3 * request
        own = victims[batch.first_block_ids[request]]
        own.copy_(slots % (num_slots * shape.block_size))
    compare_decodes(make, shape, scoring, batch, theirs, victims)


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
def test_nothing_near_enough_is_dropped(make: Callable[[Shape], Kernels]) -> None:
    """With a threshold that no pair of random keys reaches, outputs are those without merging.

    But for the order of one logit's sum: the new token's is computed apart.
    """
    shape, outs = Shape(2, 3, 64, 16), []
    for scoring in (Scoring(), Scoring(merge=0.99)):
        batch, owned = decode_batch(shape)
        cache = filled(shape, owned + 1, seed=2, merges=scoring.merge > 0)
        if cache.mass is not None:
            cache.mass.fill_(1.0)
        torch.manual_seed(3)
        query, (key, value) = torch.randn(7, 6, 64), torch.randn(2, 7, 2, 64)
        out, victims = torch.zeros_like(query), torch.zeros(owned + 1, 2, dtype=torch.int32)
        tensors = StepTensors(query, key, value, out, 0.2)
        make(shape).decode(cache, batch, victims, tensors, scoring)
        outs.append(out)
        assert cache.mass is None or (cache.mass == 1.0).all()
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-6)
