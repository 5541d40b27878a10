# SPDX-License-Identifier: Apache-2.0
"""Decoding on the CPU: ties, strangers' pages and strangers' requests, one kernel at a time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.kernels.harness import Layer, Life, Shape, empty_cache
from tests.kernels.truth import Count, bits, live
from vllm_h2o.kernels.batch import DECODE_FIELDS, DecodeBatch
from vllm_h2o.kernels.cache import LayerCache, cache_rows
from vllm_h2o.kernels.reference import select_victim
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.kernels.torch import decode
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.policy import Budget

SHAPE = Shape(num_kv_heads=2, group=3, head_size=64, block_size=16)


def make_batch(tables: list[list[int]], attended: list[int], **fields: list[int]) -> DecodeBatch:
    """A batch over such block tables; queries score, and every other field is zeros."""
    num_requests = len(tables)
    values = {"attended_len": attended, "scores": [1] * num_requests, **fields}
    rows = [values.get(name, [0] * num_requests) for name in DECODE_FIELDS]
    return DecodeBatch(torch.tensor(tables, dtype=torch.int32), torch.tensor(rows))


def attend(cache: LayerCache, batch: DecodeBatch, scale: float, power: int = 1) -> torch.Tensor:
    """Random queries of three heads a group, each new token in the last slot."""
    query = torch.randn(batch.block_table.shape[0], 6, 64)
    strips = decode.Strips.of(cache, batch)
    return decode.attend_and_score(cache, batch, strips, query, scale, power)


def random_page(num_blocks: int) -> LayerCache:
    """Pages of random content; positions are those of 16 different tokens a page."""
    cache = LayerCache.of(empty_cache(SHAPE, num_blocks), SHAPE.head_size)
    for view in (cache.key, cache.value, cache.score):
        view.normal_()
    cache.position.copy_(torch.arange(16).repeat(cache.position.shape[0], 1))
    return cache


def snapshot(cache: LayerCache) -> LayerCache:
    """A copy of what the pages hold."""
    views = {name: getattr(cache, name).clone() for name in ("key", "value", "score", "position")}
    return replace(cache, **views)


@pytest.mark.parametrize("seed", range(20))
def test_victims_among_ties_equal_the_reference(seed: int) -> None:
    """Among few different scores, in any order of slots, each head's victim is the reference's."""
    rng, cache = random.Random(seed), random_page(9)
    attended = [48, 33, 17]
    tables = [[3, 1, 7], [5, 2, 4], [8, 6, 3]]
    rows = cache_rows(torch.tensor(tables), 2)
    num_recent, num_sinks = [5, 0, 16], [0, 4, 0]
    expected = []
    for b, length in enumerate(attended):
        recent, sinks = num_recent[b], num_sinks[b]
        budget = Budget(length, length - 1 - recent - sinks, recent, sinks)
        for h in range(2):
            position = torch.tensor(rng.sample(range(length), length), dtype=torch.int32)
            score = torch.tensor([rng.choice([0.0, 0.5, 1.0]) for _ in range(length)])
            slot = torch.arange(length)
            at = rows[b, h, slot // 16], slot % 16
            cache.position[at], cache.score[at] = position, score
            strip = Strip(torch.empty(length, 0), torch.empty(0), score, position)
            expected.append(select_victim(strip, length, budget))
    batch = make_batch(
        tables,
        attended,
        selects=[1, 1, 1],
        recent_start=[n - r for n, r in zip(attended, num_recent, strict=True)],
        num_sinks=num_sinks,
    )
    victims = torch.full((9, 2), -7, dtype=torch.int32)
    decode.select_victims(cache, batch, decode.Strips.of(cache, batch), victims)
    assert victims[batch.first_block_ids].flatten().tolist() == expected
    others = [block for block in range(9) if block not in (3, 5, 8)]
    assert (victims[others] == -7).all()


@pytest.mark.parametrize("selects", [[0, 0], [0, 1]])
def test_only_full_requests_select(selects: list[int]) -> None:
    """Requests with room left write no victim, and with none full nothing is written."""
    cache, victims = random_page(5), torch.full((5, 2), -7, dtype=torch.int32)
    batch = make_batch([[1, 2], [3, 4]], [20, 32], selects=selects, recent_start=[16, 8])
    decode.select_victims(cache, batch, decode.Strips.of(cache, batch), victims)
    written = (victims != -7).all(dim=1).tolist()
    assert written == [False, False, False, bool(selects[1]), False]


def test_store_takes_one_slot() -> None:
    """Each head's token goes to its own victim's slot, or behind the resident ones; no other."""
    cache = random_page(6)
    before = snapshot(cache)
    batch = make_batch([[4, 2], [1, 3]], [32, 19], overwrites=[1, 0], logical_start=[70, 18])
    victims = torch.full((6, 2), 99, dtype=torch.int32)
    victims[4] = torch.tensor([5, 20])
    key, value = torch.ones(2, 2, 64), torch.full((2, 2, 64), 2.0)
    strips = decode.Strips.of(cache, batch)
    slot = decode.new_slots(batch, victims, strips)
    decode.store(cache, batch, strips, slot, key, value)
    places = {(4 * 2, 5): 70, (2 * 2 + 1, 4): 70, (3 * 2, 2): 18, (3 * 2 + 1, 2): 18}
    for (row, slot), position in places.items():
        assert (cache.key[row, slot] == 1).all() and (cache.value[row, slot] == 2).all()
        assert cache.score[row, slot] == 0.0 and cache.position[row, slot] == position
    for name in ("key", "value", "score", "position"):
        changed = bits(getattr(cache, name)) != bits(getattr(before, name))
        changed = changed if changed.dim() == 2 else changed.any(-1)
        assert {tuple(at) for at in changed.nonzero().tolist()} == places.keys()


@pytest.mark.parametrize("stale", [[5, 6], [1, 1], [3, 0]], ids=["free", "own", "another's"])
def test_decode_leaves_other_requests_pages_alone(stale: list[int]) -> None:
    """Pages after a request's own, NaN or another request's, are neither read nor written."""
    outputs, scores, chosen = [], [], []
    for junk in (0.0, torch.nan, torch.inf):
        torch.manual_seed(0)
        cache = random_page(7)
        for view in (cache.key, cache.value, cache.score):
            view[5 * 2 :] = junk
            view[2 * 2 : 3 * 2, 4:] = junk  # slots of request 0 that no token has taken yet
        batch = make_batch(
            [[1, 2, *stale], [3, 4, 0, 0]],
            [20, 32],
            selects=[1, 1],
            recent_start=[16, 16],
        )
        before, victims = snapshot(cache), torch.zeros(7, 2, dtype=torch.int32)
        outputs.append(attend(cache, batch, 0.1))
        decode.select_victims(cache, batch, decode.Strips.of(cache, batch), victims)
        touched = bits(cache.score) != bits(before.score)
        assert touched[2:4].all() and touched[4:6, :4].all() and touched[6:10].all()
        assert not touched[:2].any() and not touched[4:6, 4:].any() and not touched[10:].any()
        scores.append(cache.score[2:4].clone())
        chosen.append(victims)
    for same in (outputs, scores, chosen):
        assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])


def test_scores_grow_by_what_was_drawn() -> None:
    """A step adds one per query head to each KV head's scores, over its resident slots."""
    cache = random_page(4)
    before = snapshot(cache)
    batch = make_batch([[1, 2], [3, 0]], [25, 9])
    attend(cache, batch, 0.3)
    grown = (cache.score - before.score).view(4, 2, 16).double()
    sums = torch.stack([grown[1].sum(-1) + grown[2].sum(-1), grown[3].sum(-1)])
    torch.testing.assert_close(sums, torch.full((2, 2), 3.0).double(), rtol=0, atol=1e-5)
    attend(cache, batch, 0.3, power=0)
    assert torch.equal(cache.score - before.score, grown.float().view(8, 16))


def by_request(
    lives: list[Life], seed: int, extra_pages: int = 0, pause: float = 0.0
) -> dict[str, list[tuple[torch.Tensor, torch.Tensor | None]]]:
    """Each request's outputs and victims, step by step, of a run with room for all."""
    pages = sum(-(-life.max_slots // SHAPE.block_size) for life in lives)
    layer = Layer(SHAPE, "h2o", pages + 1, seed, extra_pages, TorchKernels())
    count = Count()
    trace = live(layer, lives, count, pause)
    assert count.num_selections > 0 and count.num_near_ties == 0
    return {
        life.request_id: [e[life.request_id] for e in trace if life.request_id in e]
        for life in lives
    }


def company(num: int) -> list[Life]:
    """Requests of different budgets, prompts and lengths; the first is always the same one."""
    budgets = [Budget(32, 15, 16, 0), Budget(16, 11, 4, 0), Budget(48, 20, 23, 4)]
    return [
        Life(f"r{i}", budgets[i % 3], [20, 12 + 7 * i, 9], 60 if i == 0 else 10 + 5 * i)
        for i in range(num)
    ]


def same_life(
    one: list[tuple[torch.Tensor, torch.Tensor | None]],
    other: list[tuple[torch.Tensor, torch.Tensor | None]],
) -> None:
    """The same victims in every step, and outputs that differ in the last bits at most."""
    assert sum(victims is not None for _, victims in one) == 60
    for (output, victims), (expected, expected_victims) in zip(one, other, strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
        assert (victims is None) == (expected_victims is None)
        assert victims is None or torch.equal(victims, expected_victims)


def test_company_changes_nothing() -> None:
    """A request among 15 others evicts what it evicts alone, step by step, and returns the same."""
    alone = by_request(company(1), seed=1)["r0"]
    among = by_request(company(16), seed=2, pause=0.3)["r0"]
    same_life(alone, among)


def test_wider_tables_change_nothing() -> None:
    """Block tables wider than the longest request needs change no victim and no output."""
    narrow = by_request(company(3), seed=1)["r0"]
    same_life(narrow, by_request(company(3), seed=1, extra_pages=3)["r0"])
