# SPDX-License-Identifier: Apache-2.0
"""The rare stages in pages, against the reference's strip, and the next turn by the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.caches import filled
from tests.kernels.harness import Shape, empty_cache
from tests.kernels.one_head import Inputs, causal, close, run
from tests.kernels.one_head import head as new_head
from vllm_h2o.kernels.batch import PromptChunk, Scoring
from vllm_h2o.kernels.cache import LayerCache, cache_rows
from vllm_h2o.kernels.held import Held
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.kernels.torch import pack, prefill, terms
from vllm_h2o.kernels.torch.rare import RareStages
from vllm_h2o.policy.h2o2 import WINDOW

RARE = RareStages()
NUM_BLOCKS, HEADS, BLOCK, SIZE = 9, 2, 8, 16


def rotate_back(key: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """Angles of one theta for each pair, in the keys' dtype."""
    half = key.shape[-1] // 2
    frequency = 100.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = -distance[..., None] * frequency
    cos, sin = angle.cos().to(key.dtype), angle.sin().to(key.dtype)
    a, b = key[..., :half], key[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("num_slots", [BLOCK, 21, 24])
def test_renumber_is_the_references_strip(num_slots: int, accumulates: bool) -> None:
    """Slots in any order of position, in any pages; nothing else of the cache is touched."""
    torch.manual_seed(num_slots)
    words = torch.randn(NUM_BLOCKS, HEADS, BLOCK, 2 * SIZE + 2)
    cache = LayerCache.of(words, SIZE)
    blocks = torch.randperm(NUM_BLOCKS)[:4].to(torch.int32)
    rows = cache_rows(blocks, HEADS)
    cache.position.fill_(-7)
    end = 90
    for head in range(HEADS):
        some = torch.randperm(end - 1)[: num_slots - 1]
        own = torch.cat([some, torch.tensor([end - 1])])[torch.randperm(num_slots)]
        flat = cache.position[rows[head]].flatten()
        flat[:num_slots] = own.to(torch.int32)
        cache.position[rows[head]] = flat.view(-1, BLOCK)
    before = [view.clone() for view in (cache.key, cache.value, cache.score, cache.position)]

    def held(views: list[torch.Tensor], head: int) -> list[torch.Tensor]:
        return [view[rows[head]].flatten(0, 1)[:num_slots] for view in views]

    strips = []
    for head in range(HEADS):
        key, value, score, position = held(before, head)
        strip = Strip(key.double(), value.double(), score.double(), position.long())
        assert strip.renumber(end, rotate_back, accumulates) == num_slots
        strips.append(strip)
    RARE.renumber(cache, blocks, num_slots, end, rotate_back, accumulates)
    after = [cache.key, cache.value, cache.score, cache.position]
    for head, strip in enumerate(strips):
        key, value, score, position = held(after, head)
        assert sorted(position.tolist()) == list(range(num_slots))
        assert position.tolist() == strip.position.tolist()
        torch.testing.assert_close(key.double(), strip.key, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(value.double(), strip.value, rtol=0, atol=0)
        torch.testing.assert_close(score.double(), strip.score, rtol=1e-5, atol=1e-6)
        if accumulates:  # what it got per query stays what it was
            old = held(before, head)
            mean, was = score / (num_slots - position), old[2] / (end - old[3])
            torch.testing.assert_close(mean, was, rtol=1e-5, atol=1e-6)
    mine = torch.zeros(cache.position.shape, dtype=torch.bool)
    slot = torch.arange(num_slots)
    mine[rows[:, slot // BLOCK], (slot % BLOCK).expand(HEADS, -1)] = True
    for view, old in zip(after, before, strict=True):
        assert torch.equal(view[~mine], old[~mine])


SHAPE = Shape(num_kv_heads=2, group=3, head_size=64, block_size=16)
LENGTH = 57


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("merges", [False, True])
def test_scores_without_a_term_move_and_come_back(splits: bool, merges: bool) -> None:
    """Each survivor's own score, in every head; only the prompt's tokens get it."""
    torch.manual_seed(5)
    empty = empty_cache(SHAPE, 12, 1 + merges)
    cache = LayerCache.of(empty, SHAPE.head_size, splits, merges, keeps_scores=True)
    chunk = PromptChunk(
        tokens=slice(0, LENGTH),
        block_table=torch.tensor([5, 2, 8, 1], dtype=torch.int32),
        resident_start=0,
        logical_start=0,
        num_survivors=31,
        recent_start=LENGTH - 6,
        splits=splits,
    )
    prefill.store(cache, chunk, *torch.randn(2, LENGTH, 2, 64))
    plain, uneven = torch.rand(2, LENGTH), torch.tensor([[5.0], [500.0]])
    prefill.add_to_scores(cache, chunk, plain)
    terms.keep_scores(cache, chunk, WINDOW)
    prefill.add_to_scores(cache, chunk, uneven * torch.rand(2, LENGTH))
    pack.pack_survivors(cache, chunk, Scoring(by_age=True))
    blocks = chunk.block_table[:2]
    strips = cache.rows_of_split(blocks.long()) if splits else [*cache_rows(blocks, 2)]
    assert sorted(len(strip) for strip in strips) == ([1, 3] if splits else [2, 2])
    newest = strips[0][-1], 15
    cache.position[newest], cache.score[newest] = LENGTH, 7.0  # a token after the prompt
    RARE.restore_scores(cache, blocks, torch.tensor([LENGTH] * 2))
    for head, strip in enumerate(strips):
        num_held = 16 * len(strip) - 1
        position = cache.position[strip].flatten()[:num_held].long()
        assert torch.equal(cache.score[strip].flatten()[:num_held], plain[head, position])
        assert position.tolist() == sorted({*position.tolist()})
    assert cache.score[newest] == 7.0


TURN = Shape(num_kv_heads=3, group=1, head_size=32, block_size=8)
NUM_HELD = 29


def held_by(cache: LayerCache, blocks: torch.Tensor, one: int, num_slots: int) -> Strip:
    """The strip of one KV head."""
    rows = cache_rows(blocks, cache.num_kv_heads)[one]
    views = (cache.key, cache.value, cache.score, cache.position)
    key, value, score, position = (view[rows].flatten(0, 1)[:num_slots] for view in views)
    return Strip(key, value, score, position.long())


def test_copies_are_in_order_and_pages_may_be_written_to() -> None:
    """Twin of ``Strip.in_order``, of two requests one of which takes the other's pages."""
    cache = filled(TURN, 12, seed=3)
    for row in range(len(cache.position)):  # each slot another position, in no order
        order = torch.randperm(8, generator=torch.Generator().manual_seed(row))
        cache.position[row] = (row // 3 * 8 + order).int()
    sources = [torch.tensor(ids) for ids in ((5, 2, 9, 1), (3, 4, 10, 7))]
    targets = [torch.tensor(ids) for ids in ((3, 11, 2, 5), (6, 4, 8, 0))]
    wanted = [
        [held_by(cache, blocks, one, NUM_HELD).in_order() for one in range(3)] for blocks in sources
    ]
    held = [Held.of(cache, blocks) for blocks in sources]
    for tokens, blocks in zip(held, targets, strict=True):
        tokens.store_in_order(cache, blocks, NUM_HELD)
    for blocks, strips in zip(targets, wanted, strict=True):
        for one, strip in enumerate(strips):
            found = held_by(cache, blocks, one, NUM_HELD)
            for name in ("key", "value", "score", "position"):
                assert torch.equal(getattr(found, name), getattr(strip, name)), name


@pytest.mark.parametrize("in_order", [False, True])
def test_a_lifetime_ends_with_a_turn(in_order: bool) -> None:
    """Only the prompt's tokens are restored; where it goes on, both scores are as they were."""
    cache = filled(TURN, 4, seed=3)
    cache = replace(cache, score_without_window=torch.full_like(cache.score, 9.0))
    cache.position[:] = torch.arange(32).view(4, 1, 8).expand(4, 3, 8).reshape(12, 8).int()
    blocks, score = torch.arange(4), cache.score.clone()
    held = Held.of(cache, blocks)
    for end in (20, 0):
        if in_order:
            held.store_in_order(cache, blocks, 32, end)
        else:
            held.store(cache, blocks, end)
        assert torch.equal(cache.score, torch.where(cache.position < end, 9.0, score))
        assert cache.score_without_window is not None
        assert (cache.score_without_window == 9.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_slots_that_are_not_used_are_not_copied(dtype: torch.dtype) -> None:
    """What others have left there, and does not belong into a file."""
    cache = filled(TURN, 6, seed=3)
    cache = replace(cache, key=cache.key.to(dtype), value=cache.value.to(dtype))
    blocks = torch.tensor([4, 1])
    whole, held = Held.of(cache, blocks), Held.of(cache, blocks, 11)
    assert held.parts.keys() == whole.parts.keys()
    for name in ("key", "value", "score", "position"):
        copy, view = (each.parts[name].flatten(1, 2).float() for each in (held, whole))
        assert torch.equal(copy[:, :11], view[:, :11]) and not copy[:, 11:].any()
        assert view[:, 11:].any()


@pytest.mark.parametrize("splits", [False, True])
def test_pages_are_copied_as_they_are(splits: bool) -> None:
    """With what is kept under the first block, though one request takes the other's pages."""
    cache = filled(TURN, 12, seed=3)
    cache = replace(
        cache,
        first_rows=torch.zeros(12, 4, dtype=torch.int32) if splits else None,
        victims=torch.zeros(12, 3, dtype=torch.int32),
        score_without_window=torch.full_like(cache.score, 9.0),
    )
    sources = [torch.tensor(ids) for ids in ((5, 2, 9), (3, 4, 10))]
    targets = [torch.tensor(ids) for ids in ((3, 11, 2), (6, 4, 8))]
    own = {"victims": torch.tensor([[3, 20, 9], [1, 2, 30]], dtype=torch.int32)}
    if splits:
        own["first_rows"] = torch.tensor([[0, 1, 7, 9], [0, 4, 5, 9]], dtype=torch.int32)
    for name, values in own.items():
        for blocks, value in zip(sources, values, strict=True):
            getattr(cache, name)[blocks[0]] = value
    views = (cache.key, cache.value, cache.score, cache.position)
    read = [[view[cache.rows(blocks)].clone() for view in views] for blocks in sources]
    lived = [Held.of(cache, blocks) for blocks in sources]
    for held, blocks, end in zip(lived, targets, (0, 20), strict=True):
        held.to(torch.device("cpu")).store(cache, blocks, end)
    for index, blocks in enumerate(targets):
        key, value, score, position = read[index]
        if index:
            score = torch.where(position < 20, 9.0, score)
        for view, wanted in zip(views, (key, value, score, position), strict=True):
            assert torch.equal(view[cache.rows(blocks)], wanted)
        for name, values in own.items():
            assert torch.equal(getattr(cache, name)[blocks[0]], values[index])


def test_a_conversation_is_attention_to_what_is_left() -> None:
    """By the definition: a second turn is a prompt after all that is held; then C - 1 stay."""
    inputs, one = Inputs.draw(34), new_head(capacity=12, num_recent=4)
    first = Inputs(inputs.query[:25], inputs.key[:25], inputs.value[:25])
    run(one, first, [20])
    before = set(one.strip.position.tolist())
    assert one.victim is not None and len(before) == 12
    one.begin_turn()
    assert one.strip.position.tolist() == sorted(before)
    new = slice(25, 34)
    out = one.step(inputs.query[new], inputs.key[new], inputs.value[new], ends_prompt=True)
    visible = causal(34)
    visible[new, [token for token in range(25) if token not in before]] = False
    close(out, inputs.attend(visible)[new])
    after = set(one.strip.position.tolist())
    assert len(after) == 11 and after <= before | set(range(25, 34)) and set(range(30, 34)) <= after
    assert one.victim is None and not one.in_prompt
