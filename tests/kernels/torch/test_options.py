"""What is added to scores, by which queries, and when a prompt is packed: against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.harness import Layer, Life, Shape
from tests.kernels.lives import make_lives, pool_size, rows
from tests.kernels.truth import Ranking, live
from vllm_h2o.kernels.native.loader import load
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.policy import Budget

SCORES = {
    "squares": (("score", "sum_squares"),),
    "older tokens": (("score_skip_recent", 3),),
    "squares of older tokens": (("score", "sum_squares"), ("score_skip_recent", 20)),
    "means": (("score", "mean"),),
    "means of squares": (("score", "mean_squares"),),
    "plain": (),
}
PROMPTS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"observation_window": 5},
    "chunked": {"packs_chunks": True},
}
LARGEST = (("prefill", "window"),)
SCORES_OF_WINDOWS = {
    "largest": LARGEST,
    "largest square of older tokens": (
        *LARGEST, ("score", "sum_squares"), ("score_skip_recent", 3)
    ),
}  # fmt: skip
ALL_SCORES = {**SCORES, **SCORES_OF_WINDOWS}
PAGES = (("granularity", "block"), ("recent_ratio", 0.0))
"""The layer takes its requests' budgets, and which queries score, from their lives."""


@pytest.fixture(scope="module")
def ranking() -> Iterator[Ranking]:
    """Over all lives of this module, float32 may rank one selection in a thousand otherwise."""
    count = Ranking()
    yield count
    count.check()


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize(
    ("prompt", "score"),
    [*product(PROMPTS, SCORES), *product(("full", "window"), SCORES_OF_WINDOWS)],
)
@given(data=st.data())
def test_any_lives(
    native: bool, score: str, prompt: str, data: st.DataObject, ranking: Ranking
) -> None:
    """Retained tokens, scores and outputs are the reference's after every step."""
    shape = Shape(2, data.draw(st.sampled_from([1, 3])), 64, 16)
    drawn = make_lives(data.draw(st.lists(rows(16, "h2o"), min_size=1, max_size=4)))
    lives = [replace(life, **PROMPTS[prompt]) for life in drawn]
    num_blocks = pool_size(lives, shape.block_size, 1.0)
    seed, kernels = data.draw(st.integers(0, 99)), load() if native else TorchKernels()
    layer = Layer(shape, "h2o", num_blocks, seed, kernels=kernels, options=ALL_SCORES[score])
    live(layer, "h2o", lives, ranking)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize(
    ("prompt", "options"), [*product(PROMPTS, [PAGES]), ("window", (*PAGES, *LARGEST))]
)
@given(data=st.data())
def test_any_lives_by_page(
    native: bool,
    prompt: str,
    options: tuple[tuple[str, Any], ...],
    data: st.DataObject,
    ranking: Ranking,
) -> None:
    """The same where whole pages go, and are refilled in place."""
    lives = []
    for i in range(data.draw(st.integers(1, 3))):
        recent, sinks = data.draw(st.integers(0, 40)), data.draw(st.sampled_from([0, 0, 3, 17]))
        least = -(-recent // 16) - (-sinks // 16) + 3
        capacity = 16 * (least + data.draw(st.integers(0, 2)))
        budget = Budget(capacity, capacity - 1 - recent - sinks, recent, sinks)
        chunks = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=3))
        decodes = data.draw(st.integers(0, 80))
        life = Life(f"r{i}", budget, chunks, decodes, seed=i, evicts_blocks=True)
        lives.append(replace(life, **PROMPTS[prompt]))
    shape, kernels = Shape(2, 3, 64, 16), load() if native else TorchKernels()
    num_blocks = pool_size(lives, shape.block_size, 1.0)
    layer = Layer(shape, "h2o", num_blocks, kernels=kernels, options=options)
    live(layer, "h2o", lives, ranking)


UNEQUAL = {
    "plain": ((), 0),
    "means of squares": ((("score", "mean_squares"),), 0),
    "window": (LARGEST, 20),
}


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("score", UNEQUAL)
@given(data=st.data())
def test_any_lives_of_unequal_heads(
    native: bool, score: str, data: st.DataObject, ranking: Ranking
) -> None:
    """The same where KV heads share slots, of a layer or of all, among others where they do not."""
    options, window = UNEQUAL[score]
    lives = []
    for i in range(data.draw(st.integers(1, 4))):
        capacity, sinks = 8 * data.draw(st.integers(1, 6)), data.draw(st.sampled_from([0, 0, 3]))
        recent = data.draw(st.integers(0, capacity - 1 - sinks))
        budget = Budget(capacity, capacity - 1 - recent - sinks, recent, sinks)
        chunks = data.draw(st.lists(st.integers(1, 2 * capacity), min_size=1, max_size=3))
        life = Life(f"r{i}", budget, chunks, data.draw(st.integers(0, 60)), seed=i)
        lives.append(replace(life, splits=i != 2, observation_window=window))
    # Of layers that share slots a few heads are many.
    num_layers = data.draw(st.sampled_from([1, 1, 2, 3]))
    num_kv_heads = data.draw(st.sampled_from([1, 2, 3, 5] if num_layers == 1 else [1, 2]))
    group = data.draw(st.sampled_from([1, 3]))
    shape = Shape(num_kv_heads, group, 32, 8, num_layers=num_layers)
    num_blocks = pool_size(lives, shape.block_size, 1.0)
    kernels = load() if native else TorchKernels()
    layer = Layer(shape, "h2o", num_blocks, kernels=kernels, options=(*options, ("split", True)))
    live(layer, "h2o", lives, ranking)


def retained(prompt: str, chunks: list[int], score: str = "plain") -> list[int]:
    """Positions that one KV head holds after a prompt in these chunks and three tokens more."""
    (life,) = make_lives([(32, 7, 0, chunks, 3)])
    life = replace(life, **PROMPTS[prompt])
    shape = Shape(1, 1, 64, 16)
    layer = Layer(shape, "h2o", 20, options=ALL_SCORES[score])
    life.prepare(shape)
    while life.num_left:
        plan = life.next_plan()
        layer.step({life.request_id: plan}, {life.request_id: life})
    held = layer.slots(layer.cache.position, life.request_id, plan.resident_end)
    return sorted(held[0].tolist())


def test_each_option_changes_what_is_kept() -> None:
    """None of them is a silent no-op, and chunks matter only where chunks are packed."""
    plain = retained("full", [75, 75])
    assert plain == retained("full", [150])
    assert retained("window", [75, 75]) == retained("window", [149, 1])
    others = [
        retained("window", [75, 75]),
        retained("window", [75, 75], "largest"),
        retained("chunked", [75, 75]),
        retained("full", [150], "squares"),
        retained("full", [150], "older tokens"),
        retained("full", [150], "means"),
    ]
    assert all(other != plain for other in others)
    assert others[0] != others[1]
    # The window's queries may be those of several chunks, of one token too.
    assert others[1] == retained("window", [147, 2, 1], "largest")
    assert retained("chunked", [150]) == plain


def test_a_life_is_what_it_says() -> None:
    """Its ledger packs within the prompt, and lets the window's queries score alone."""
    life = replace(make_lives([(16, 7, 0, [30, 30], 1)])[0], packs_chunks=True)
    life.prepare(Shape(1, 1, 64, 16))
    assert [life.next_plan().num_survivors for _ in range(3)] == [15, 15, 0]
    life = Life("r", life.budget, [30, 30], 1, observation_window=5)
    life.prepare(Shape(1, 1, 64, 16))
    assert {life.next_plan().scoring_start for _ in range(3)} == {55}
