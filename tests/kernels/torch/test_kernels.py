"""The torch kernels, driven as the engine drives them, against the reference after every step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from tests.kernels.harness import Layer, Life, Shape
from tests.kernels.lives import TABLE, cases, make_lives, pool_size
from tests.kernels.truth import Ranking, live
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.policy import POLICIES

TORCH = TorchKernels()


@pytest.fixture(scope="module")
def ranking() -> Iterator[Ranking]:
    """Over all lives of this module, float32 may rank one selection in a thousand otherwise."""
    count = Ranking()
    yield count
    count.check()


@pytest.mark.parametrize("name", TABLE)
def test_lives(name: str, ranking: Ranking) -> None:
    """Retained tokens, scores, K, V, outputs and writes are the reference's after every step."""
    policy, shape, rows = TABLE[name]
    lives = make_lives(rows)
    layer = Layer(shape, policy, pool_size(lives, shape.block_size, share=0.7), kernels=TORCH)
    before = ranking.num_selections
    live(layer, policy, lives, ranking)
    assert (ranking.num_selections > before) is POLICIES[policy].evicts


@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(case=cases())
def test_any_lives(case: tuple[str, Shape, list[Life], float, int], ranking: Ranking) -> None:
    """The same for drawn shapes, policies, budgets, prompts, chunks and schedules."""
    policy, shape, lives, share, seed = case
    layer = Layer(shape, policy, pool_size(lives, shape.block_size, share), seed, kernels=TORCH)
    live(layer, policy, lives, ranking)
