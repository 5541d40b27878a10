# SPDX-License-Identifier: Apache-2.0
"""How tokens are ranked, and when they are evicted, in any combination: against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import drawn
from tests.kernels.harness import Layer, Life, Shape
from tests.kernels.lives import (
    RANKINGS,
    Options,
    make_lives,
    page_budget,
    pool_size,
    rows,
    with_windows,
)
from tests.kernels.truth import Count, live
from vllm_h2o.kernels.native.loader import load
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.policy import Budget
from vllm_h2o.policy.eviction import At

PAGES: Options = (("evict_every", "page"),)
"""The layer takes its requests' budgets from their lives."""
WHEN: list[At] = ["prompt_end", "pressure"]
AT = [*product(RANKINGS, WHEN), ("sum", "chunk"), ("mean of squares", "chunk")]
"""After each chunk only what every query of a prompt adds to can be evicted from."""

each_set = pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])


@pytest.fixture(scope="module")
def count() -> Iterator[Count]:
    """Over all lives of this module, float32 may rank one selection in a thousand otherwise."""
    counted = Count()
    yield counted
    counted.check()


@each_set
@pytest.mark.parametrize(("ranking", "at"), AT)
@drawn(5)
@given(data=st.data())
def test_drawn_options_equal_the_reference(
    native: bool, ranking: str, at: At, data: st.DataObject, count: Count
) -> None:
    """Retained tokens, scores and outputs are the reference's after every step."""
    policy, options = RANKINGS[ranking]
    shape = Shape(2, data.draw(st.sampled_from([1, 3])), 64, 16)
    lives = make_lives(data.draw(st.lists(rows(16, policy), min_size=1, max_size=4)))
    lives = [replace(life, at=at) for life in with_windows(lives)]
    num_blocks = pool_size(lives, shape.block_size, 1.0)
    seed, kernels = data.draw(st.integers(0, 99)), load() if native else TorchKernels()
    layer = Layer(shape, policy, num_blocks, seed, kernels=kernels, options=options)
    live(layer, lives, count)


@each_set
@pytest.mark.parametrize(("ranking", "at"), AT)
@drawn(5)
@given(data=st.data())
def test_any_lives_by_page(
    native: bool, ranking: str, at: At, data: st.DataObject, count: Count
) -> None:
    """The same where whole pages are evicted, one or two at a time."""
    policy, options = RANKINGS[ranking]
    lives = []
    for i in range(data.draw(st.integers(1, 3))):
        recent, sinks = data.draw(st.integers(0, 40)), data.draw(st.sampled_from([0, 0, 3, 17]))
        pages, every = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 1, 2]))
        budget = page_budget(16, pages, recent, sinks, every)
        chunks = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=3))
        lives.append(Life(f"r{i}", budget, chunks, data.draw(st.integers(0, 80)), seed=i, at=at))
    lives = with_windows(lives)
    shape, kernels = Shape(2, 3, 64, 16), load() if native else TorchKernels()
    num_blocks = pool_size(lives, shape.block_size, 1.0)
    layer = Layer(shape, policy, num_blocks, kernels=kernels, options=(*options, *PAGES))
    live(layer, lives, count)


@each_set
@pytest.mark.parametrize("ranking", ["sum", "mean of squares", "combined", "snapkv"])
@drawn(12)
@given(data=st.data())
def test_any_lives_of_unequal_heads(
    native: bool, ranking: str, data: st.DataObject, count: Count
) -> None:
    """The same where KV heads share slots, of a layer or of all, among others where they do not."""
    policy, options = RANKINGS[ranking]
    lives = []
    for i in range(data.draw(st.integers(1, 4))):
        capacity, sinks = 8 * data.draw(st.integers(1, 6)), data.draw(st.sampled_from([0, 0, 3]))
        recent = data.draw(st.integers(0, capacity - 1 - sinks))
        budget = Budget(capacity, capacity - 1 - recent - sinks, recent, sinks)
        chunks = data.draw(st.lists(st.integers(1, 2 * capacity), min_size=1, max_size=3))
        at = data.draw(st.sampled_from(WHEN))
        life = Life(f"r{i}", budget, chunks, data.draw(st.integers(0, 60)), seed=i, at=at)
        lives.append(replace(life, splits=i != 2))
    lives = with_windows(lives)
    # Of layers that share slots a few heads are many.
    num_layers = data.draw(st.sampled_from([1, 1, 2, 3]))
    num_kv_heads = data.draw(st.sampled_from([1, 2, 3, 5] if num_layers == 1 else [1, 2]))
    group = data.draw(st.sampled_from([1, 3]))
    shape = Shape(num_kv_heads, group, 32, 8, num_layers=num_layers)
    num_blocks = pool_size(lives, shape.block_size, 1.0)
    kernels = load() if native else TorchKernels()
    split = ("split", "heads" if num_layers == 1 else "layers")
    options = (*(o for o in options if o[0] != "split"), split)
    layer = Layer(shape, policy, num_blocks, kernels=kernels, options=options)
    # Their queries are up to twice as sharp: float32's largest errors are 5e-6.
    live(layer, lives, count, output_atol=2e-5)


def retained(
    ranking: str, chunks: list[int], at: At = "prompt_end", pages: bool = False
) -> set[int]:
    """Positions that one KV head holds after a prompt in these chunks and three tokens more."""
    (life,) = make_lives([(48, 7, 0, chunks, 3)])
    budget = page_budget(16, 2, 7, 0) if pages else life.budget
    (life,) = with_windows([replace(life, at=at, budget=budget)])
    shape, (policy, options) = Shape(1, 1, 64, 16), RANKINGS[ranking]
    layer = Layer(shape, policy, 20, options=(*options, *(PAGES if pages else ())))
    life.prepare(shape)
    while life.num_left:
        plan = life.next_plan()
        layer.step({life.request_id: plan}, {life.request_id: life})
    held = layer.slots(layer.cache.position, life.request_id, plan.resident_end)
    return set(held[0].tolist())


def test_each_ranking_and_schedule_changes_what_is_kept() -> None:
    """None of them is a silent no-op, and chunks matter only where chunks are packed."""
    plain = retained("sum", [75, 75])
    assert plain == retained("sum", [150])
    assert retained("snapkv", [75, 75]) == retained("snapkv", [144, 3, 3])
    others = [retained(ranking, [75, 75]) for ranking in RANKINGS if ranking != "sum"]
    others += [retained("sum", [75, 75], "chunk"), retained("sum", [75, 75], pages=True)]
    assert all(other != plain for other in others)
    assert len({frozenset(other) for other in others}) == len(others)
    assert retained("sum", [150], "chunk") == plain


def test_a_life_is_what_it_says() -> None:
    """Its ledger packs within the prompt, or not before memory is short."""
    life = replace(make_lives([(16, 7, 0, [30, 30], 1)])[0], at="chunk")
    life.prepare(Shape(1, 1, 64, 16))
    assert [life.next_plan().num_survivors for _ in range(3)] == [15, 15, 0]
    life = replace(life, at="pressure", num_decodes=4, num_computed=0)
    life.prepare(Shape(1, 1, 64, 16))
    assert [life.next_plan().num_survivors for _ in range(6)] == [0, 0, 0, 0, 15, 0]
