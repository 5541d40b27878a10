# SPDX-License-Identifier: Apache-2.0
"""Every set of kernels does the same as the torch ones, in each stage."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.kernels.caches import (
    BOTH,
    LAYERS,
    SHAPE,
    copied,
    filled,
    number,
    on_triton,
    prompt_chunks,
    same,
    views_of,
)
from tests.kernels.decodes import (
    KERNELS,
    compare_a_batch,
    compare_decodes,
    decode_batch,
    slow_on_triton,
)
from tests.kernels.harness import Shape, rope_of
from tests.kernels.native.cases import threads
from vllm_h2o.kernels.batch import PromptChunk, Scoring, StepTensors
from vllm_h2o.kernels.cache import LayerCache, cache_rows
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.kernels.rope import Rope
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.policy import Term
from vllm_h2o.policy.h2o2 import COMBINED, WINDOW
from vllm_h2o.policy.snapkv import SNAPKV


@pytest.fixture(autouse=True)
def several_threads() -> Iterator[None]:
    """Threads share strips, partial sums and survivors."""
    with threads(3):
        yield


SCORINGS = [
    Scoring(),
    Scoring(power=0),
    Scoring(power=2),
    Scoring(by_age=True),
    Scoring(in_prompt=False),
    Scoring(merge=0.15),
    Scoring(power=2, by_age=True, merge=0.3),
]


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
def test_decode_equals_torch(make: Callable[[Shape], Kernels], scoring: Scoring) -> None:
    """Outputs, pages and victims; of padding, a row of zeros and nothing else."""
    compare_a_batch(make, SHAPE, scoring)


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("merge", [0.0, 0.15])
def test_decode_of_a_layer_of_several(make: Callable[[Shape], Kernels], merge: float) -> None:
    """The rows of other layers are left alone."""
    compare_a_batch(make, LAYERS, Scoring(merge=merge))


@slow_on_triton(KERNELS)
@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
@BOTH
def test_decode_of_unequal_heads(
    make: Callable[[Shape], Kernels], scoring: Scoring, shape: Shape
) -> None:
    """The same where the KV heads of some requests share slots, and of others do not."""
    batch, owned = decode_batch(shape, split=True)
    theirs = filled(shape, owned + 1, seed=2, splits=True, merges=scoring.merge > 0)
    assert theirs.first_rows is not None
    # Among the rows of a request those of a layer begin anywhere.
    starts = (0, 0, 0) if shape is SHAPE else (5, 17, 1)
    bounds = torch.tensor([(0, 1, 4), (0, 13, 18), (0, 2, 12)]) + torch.tensor(starts)[:, None]
    theirs.first_rows[batch.first_block_ids[[2, 5, 6]]] = bounds.int()
    victims = torch.zeros(owned + 1, 2, dtype=torch.int32)
    victims[batch.first_block_ids[2]] = torch.tensor([3, 3 * SHAPE.block_size - 1])
    victims[batch.first_block_ids[5]] = torch.tensor([12 * SHAPE.block_size + 3, 5])
    compare_decodes(make, shape, scoring, batch, theirs, victims)


def test_a_query_that_does_not_score_keeps_no_logits() -> None:
    """A request that fits its budget costs a GPU neither a write of logits nor a read of scores."""
    batch, owned = decode_batch(SHAPE)
    kernels, cache = on_triton(SHAPE), filled(SHAPE, owned + 1, seed=2)
    query, (key, value) = torch.randn(7, 6, 64), torch.randn(2, 7, 2, 64)
    tensors = StepTensors(query, key, value, torch.empty_like(query), 0.2)
    kernels._logits = torch.full((cache.num_blocks * 6 * SHAPE.block_size,), 7.0)
    for row in ("scores", "selects"):
        batch.field(row).zero_()
    before = cache.score.clone()
    victims = torch.zeros(owned + 1, 2, dtype=torch.int32)
    kernels.decode(cache, batch, victims, tensors, Scoring())
    assert (kernels._logits == 7.0).all()
    new = cache.score != before
    assert new.sum() <= 6 * 2  # the new tokens' own
    batch.field("scores").fill_(1)
    kernels.decode(cache, batch, victims, tensors, Scoring())
    assert (kernels._logits != 7.0).any()


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize(
    ("shape", "scoring"), [*((SHAPE, scoring) for scoring in SCORINGS), (LAYERS, SCORINGS[-1])]
)
def test_prefill_equals_torch(
    make: Callable[[Shape], Kernels], shape: Shape, scoring: Scoring
) -> None:
    """Outputs and pages; what lies between the chunks' tokens is left alone."""
    chunks, owned = prompt_chunks(shape, packs=False)
    theirs = filled(shape, owned + 1, seed=4, merges=scoring.merge > 0)
    number(theirs, chunks)
    ours = copied(theirs, shape)
    torch.manual_seed(5)
    query = torch.randn(140, 6, 64)
    key, value = torch.randn(2, 140, 2, 64)
    outs = [torch.full_like(query, 7.0) for _ in range(2)]
    for kernels, cache, out in zip(
        (TorchKernels(), make(shape)), (theirs, ours), outs, strict=True
    ):
        kernels.prefill(cache, chunks, StepTensors(query, key, value, out, 0.2), scoring)
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
    same(ours, theirs, owned)


TERMS = {
    # name: (term, whether scores are ranked as means)
    "window": (WINDOW, True),
    "window of probabilities": (SNAPKV.ranking.terms[0], False),
    "sum of a window": (Term("window", "sum", weight=0.7, reach=2, skip=3), True),
    "rotated, blocks": (COMBINED.passes[0], True),
    "rotated": (Term("rotated", "sum", power=2), False),
    "reread": (Term("reread", "max", weight=0.1, block=32), False),
}
SHAPES = {
    "of several": LAYERS,
    "bfloat16": replace(SHAPE, dtype=torch.bfloat16),
    "float16": replace(SHAPE, dtype=torch.float16),
    # The smallest tiles, most of which is the reach.
    "wide heads": replace(SHAPE, group=1, head_size=256),
}
EACH_TERM = [(name, SHAPE) for name in TERMS]
EACH_TERM += list(product(("window", "rotated, blocks"), SHAPES.values()))


def asked_chunks(shape: Shape, term: Term) -> tuple[list[PromptChunk], int]:
    """Chunks of which some have queries of the term, cut into its blocks; and their pages."""
    chunks, owned = prompt_chunks(shape, packs=False)
    chunks = [
        replace(
            chunk,
            # After tokens that are gone, a chunk's positions are ahead of its slots.
            logical_start=chunk.logical_start + 5 * i,
            first_window_query=max(chunk.num_tokens - 32, 0) if i else chunk.num_tokens,
            shift=chunk.num_tokens,
        )
        for i, chunk in enumerate(chunks)
    ]
    return [b for chunk in chunks for b in chunk.in_blocks(term, shape.block_size)], owned


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize(("name", "shape"), EACH_TERM)
def test_term_scores_equal_torch(make: Callable[[Shape], Kernels], name: str, shape: Shape) -> None:
    """Scores; K, V and positions, and what follows the chunks, are left alone."""
    if make is on_triton and shape.dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies no matrices of bfloat16")
    term, by_age = TERMS[name]
    chunks, owned = asked_chunks(shape, term)
    theirs = filled(shape, owned + 1, seed=8, keeps_scores=name == "window")
    number(theirs, chunks)
    ours = copied(theirs, shape)
    torch.manual_seed(9)
    query = torch.randn(140, 2 * shape.group, shape.head_size).to(shape.dtype)
    rope = rope_of(shape.head_size) if name.startswith("rotated") else None
    # Logits as large for each head size: their rounding is what the scores differ by.
    scale, before = 1.6 * shape.head_size**-0.5, theirs.score.clone()
    tensors, given = StepTensors(query, query, query, query, scale, rope=rope), query.clone()
    for kernels, cache in ((TorchKernels(), theirs), (make(shape), ours)):
        kernels.score_term(cache, chunks, tensors, term, by_age)
    assert torch.equal(query, given)
    # Products of halves are exact in float32, and nothing is rounded to halves again.
    assert not torch.equal(theirs.score, before)
    same(ours, theirs, owned)


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("num_positions", [45, 95, 400], ids=["nowhere", "in part", "all"])
def test_queries_rotate_as_far_as_positions_reach(
    make: Callable[[Shape], Kernels], num_positions: int
) -> None:
    """Whole heads, of chunks whose ends lie before the last position, and far past it."""
    term, by_age = TERMS["rotated, blocks"]
    chunks, owned = asked_chunks(SHAPE, term)
    rope = rope_of(SHAPE.head_size, num_positions, SHAPE.head_size)
    reached = {rope.reach(chunk.shift, chunk.logical_end) for chunk in chunks}
    assert len(reached - {0}) > (num_positions > 45)
    theirs = filled(SHAPE, owned + 1, seed=8)
    number(theirs, chunks)
    ours = copied(theirs, SHAPE)
    query = torch.randn(140, 6, 64)
    tensors = StepTensors(query, query, query, query, 0.2, rope=rope)
    for kernels, cache in ((TorchKernels(), theirs), (make(SHAPE), ours)):
        kernels.score_term(cache, chunks, tensors, term, by_age)
    same(ours, theirs, owned)


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
def test_a_rope_that_rotates_nothing(make: Callable[[Shape], Kernels]) -> None:
    """As of a model whose states alone know positions: as if queries were rotated already."""
    term, by_age = TERMS["rotated, blocks"]
    chunks, owned = asked_chunks(SHAPE, term)
    one = filled(SHAPE, owned + 1, seed=8)
    number(one, chunks)
    other = copied(one, SHAPE)
    query = torch.randn(140, 6, 64)
    for cache, rope in ((one, None), (other, Rope(torch.zeros(1, 0), is_neox=True))):
        tensors = StepTensors(query, query, query, query, 0.2, rope=rope)
        make(SHAPE).score_term(cache, chunks, tensors, term, by_age)
    assert torch.equal(one.score, other.score)


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("name", ["window of probabilities", "sum of a window"])
def test_score_term_outside_of_pages(make: Callable[[Shape], Kernels], name: str) -> None:
    """A chunk whose pages others read gets its values in the layer's row; others in their pages."""
    term, by_age = TERMS[name]
    chunks, owned = asked_chunks(SHAPE, term)
    theirs = filled(SHAPE, owned + 1, seed=8)
    number(theirs, chunks)
    ours = copied(theirs, SHAPE)
    torch.manual_seed(9)
    query = torch.randn(140, 6, 64)
    tensors, found = StepTensors(query, query, query, query, 0.2, layer_index=1), []
    for kernels, cache in ((TorchKernels(), theirs), (make(SHAPE), ours)):
        shared = torch.full((3, 2, chunks[0].attended_len), 7.0)
        own = [replace(chunks[0], window_scores=shared), *chunks[1:]]
        kernels.score_term(cache, own, tensors, term, by_age)
        found.append(shared)
    torch.testing.assert_close(*found, rtol=1e-5, atol=2e-6)
    assert (found[1][[0, 2]] == 7.0).all() and (found[1][1] != 7.0).all()
    same(ours, theirs, owned)


@slow_on_triton(KERNELS)
@pytest.mark.parametrize("num_kv_heads", [1, 5])
@pytest.mark.parametrize("by_age", [False, True])
def test_pack_unequal_heads(
    make: Callable[[Shape], Kernels], num_kv_heads: int, by_age: bool
) -> None:
    """Where heads share slots: their rows, and survivors; beside prompts where they do not."""
    shape, draw = Shape(num_kv_heads, 3, 64, 16), random.Random(num_kv_heads)
    chunks, owned = prompt_chunks(shape, packs=True)
    lengths = [(chunk.attended_len // 16 * 16 - draw.choice((0, 16))) for chunk in chunks]
    chunks = [
        replace(
            chunk,
            splits=length > 0 and index != 1,
            num_survivors=max(length, 16) - 1 if chunk.attended_len > 16 else chunk.num_survivors,
        )
        for index, (chunk, length) in enumerate(zip(chunks, lengths, strict=True))
        if chunk.attended_len > 16
    ]
    kinds = {"splits": True, "merges": not by_age, "keeps_scores": by_age}
    their_layers = [filled(shape, owned + 1, seed, **kinds) for seed in (6, 7, 8)]
    for cache in their_layers:
        if cache.mass is not None:
            cache.mass.fill_(1.0)  # nothing is merged before
        # Heads are unlike, with many equal scores.
        cache.score.mul_(torch.arange(1, num_kv_heads + 1).repeat(owned + 1)[:, None])
        for chunk in chunks:
            rows = cache_rows(chunk.block_table[: -(-chunk.attended_len // 16)], num_kv_heads)
            cache.position[rows] = torch.arange(rows[0].numel() * 16).view(-1, 16).int()
    our_layers = [copied(cache, shape) for cache in their_layers]
    scoring = Scoring(by_age=by_age)
    TorchKernels().pack_survivors(their_layers, chunks, scoring)
    make(shape).pack_survivors(our_layers, chunks, scoring)
    num_unequal = 0
    for ours, theirs in zip(our_layers, their_layers, strict=True):
        for chunk in chunks:
            num_pages, blocks = (chunk.num_survivors + 1) // 16, chunk.block_table.long()
            strips = list(cache_rows(blocks[:num_pages], num_kv_heads))
            if chunk.splits:
                bounds = [
                    c.first_rows[blocks[0]] for c in (ours, theirs) if c.first_rows is not None
                ]
                assert torch.equal(*bounds)
                strips = theirs.rows_of_split(blocks[:num_pages])
                assert sum(map(len, strips)) == num_pages * num_kv_heads
                num_unequal += len(set(map(len, strips))) > 1
            for rows in strips:
                kept = len(rows) * 16 - 1 if chunk.splits else chunk.num_survivors
                for view in views_of(theirs):
                    held = [getattr(c, view)[rows].flatten(0, 1)[:kept] for c in (ours, theirs)]
                    assert torch.equal(*held), (view, chunk)
    if num_kv_heads != 2:  # too few to share much
        assert (num_unequal > 0) is (num_kv_heads > 1)


def forget_others(cache: LayerCache, chunks: list[PromptChunk]) -> None:
    """Scores in slots after the survivors may be anything."""
    for chunk in chunks:
        slot = torch.arange(chunk.num_survivors, chunk.attended_len)
        blocks = chunk.block_table[slot // cache.block_size].long()
        for head in range(cache.num_kv_heads):
            row = blocks * cache.rows_per_block + cache.first_head + head
            cache.score[row, slot % cache.block_size] = 0.0


@slow_on_triton(KERNELS)
@pytest.mark.parametrize("by_age", [False, True])
@pytest.mark.parametrize("by_page", [False, True])
@BOTH
def test_packing_of_two_layers_equals_torch(
    make: Callable[[Shape], Kernels], by_age: bool, by_page: bool, shape: Shape
) -> None:
    """Survivors of two layers, with many equal scores, of both signs too."""
    negative = by_age == by_page
    chunks, owned = prompt_chunks(shape, packs=True, by_page=by_page)
    their_layers = [filled(shape, owned + 1, seed, keeps_scores=by_age) for seed in (6, 7)]
    for cache in their_layers:
        if negative:
            cache.score.sub_(0.5)
        number(cache, chunks)
        if by_age and by_page:  # sums of ranks are exact, whatever their order
            for chunk in chunks:
                rows = cache.rows(chunk.block_table[: -(-chunk.attended_len // 16)])
                cache.score[rows] *= chunk.logical_end - cache.position[rows]
    our_layers = [copied(cache, shape) for cache in their_layers]
    scoring = Scoring(by_page=by_page, by_age=by_age)
    TorchKernels().pack_survivors(their_layers, chunks, scoring)
    make(shape).pack_survivors(our_layers, chunks, scoring)
    for ours, theirs in zip(our_layers, their_layers, strict=True):
        for cache in (ours, theirs):
            forget_others(cache, chunks)
        same(ours, theirs, owned)


@slow_on_triton(KERNELS)
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("by_page", [False, True])
def test_packing_of_many_slots_equals_torch(
    make: Callable[[Shape], Kernels], by_page: bool, holes: bool
) -> None:
    """More slots than a program holds at once; in a later turn they do not hold every position."""
    shape = Shape(num_kv_heads=1, group=1, head_size=32, block_size=128)
    num_blocks, length = 40, 5000
    theirs = filled(shape, num_blocks, seed=8)
    theirs.score.copy_(torch.rand(theirs.score.shape))
    position = torch.arange(num_blocks * 128)
    position += position // 3 * holes
    theirs.position.copy_(position.view(num_blocks, 128))
    ours = copied(theirs, shape)
    table = torch.arange(num_blocks, dtype=torch.int32)
    chunk = PromptChunk(
        tokens=slice(0, 9),
        block_table=table,
        resident_start=length - 9,
        logical_start=int(position[length - 9]),
        num_survivors=2048 + length % 128 if by_page else 2047,
        recent_start=int(position[length - 500]),
        num_sinks=4,
    )
    scoring = Scoring(by_page=by_page)
    TorchKernels().pack_survivors([theirs], [chunk], scoring)
    make(shape).pack_survivors([ours], [chunk], scoring)
    for cache in (ours, theirs):
        forget_others(cache, [chunk])
    same(ours, theirs, num_blocks)
