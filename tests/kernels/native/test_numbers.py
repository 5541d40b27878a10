# SPDX-License-Identifier: Apache-2.0
"""Each native variant against float64: odd shapes, threads, poison, every form of scoring."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.kernels.harness import Shape
from tests.kernels.native.cases import (
    Pool,
    Strip64,
    attend64,
    decode_batch,
    prompt_chunk,
    sums64,
    threads,
)
from tests.kernels.truth import bits
from vllm_h2o.kernels.batch import PromptChunk, Scoring, StepTensors
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.kernels.native import loader
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.policy import Term

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
VARIANTS = loader.available()
TOLERANCE = {FP32: 1e-5, FP16: 1e-3, BF16: 1e-2}
"""Of outputs, relative to the largest value; scores are held to the first whatever the dtype."""
SHAPES = {
    "groups of 1": Shape(2, 1, 64, 16, FP32),
    "groups of 3": Shape(3, 3, 64, 32, BF16),
    "groups of 8": Shape(2, 8, 128, 16, BF16),
    "groups of 5": Shape(1, 5, 64, 16, FP16),
    "pages of 1": Shape(2, 3, 64, 1, BF16),
    "pages of 5": Shape(1, 4, 80, 5, FP32),
    "pages of 17": Shape(3, 4, 96, 17, BF16),
    "pages of 48": Shape(1, 3, 80, 48, BF16),
    "pages of 128": Shape(2, 4, 64, 128, FP16),
    "heads of 80": Shape(2, 3, 80, 16, FP16),
    "heads of 96": Shape(2, 1, 96, 16, FP32),
    "heads of 128": Shape(2, 4, 128, 32, FP32),
    "heads of 256": Shape(1, 8, 256, 16, BF16),
    "heads of 256, float32": Shape(1, 3, 256, 16, FP32),
    "heads of 16": Shape(2, 2, 16, 16, BF16),
}
SCORINGS = {
    "sum": Scoring(),
    "squares": Scoring(power=2),
    "none": Scoring(power=0),
    "mean": Scoring(by_age=True),
    "not in prompts": Scoring(in_prompt=False),
}
TERMS = {
    "window": Term("window", "sum", weight=0.7),
    "window, largest": Term("window", "max", power=2, weight=0.3, reach=12, skip=16),
    "window, reach of sums": Term("window", "sum", power=2, reach=3, skip=1),
    "rotated": Term("rotated", "max", power=2, weight=0.1),
    "reread": Term("reread", "sum"),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    """Compare with float64, relative to the largest value."""
    assert not ours.isnan().any()
    apart = (ours.double() - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)
    assert apart <= tolerance, f"{float(apart):.3g} > {tolerance}"


def unchanged(before: LayerCache, after: LayerCache, writable: torch.Tensor) -> None:
    """Slots that are not writable, [rows, N] bool, hold the bits that they held."""
    for name in ("key", "value", "score", "position"):
        changed = bits(getattr(before, name)) != bits(getattr(after, name))
        changed = changed if changed.dim() == 2 else changed.any(-1)
        assert not (changed & ~writable).any(), name


def decode_fields(shape: Shape) -> dict[str, list[int]]:
    """Requests of many lengths, some of which overwrite, some select, one is padding."""
    size = shape.block_size
    lengths = [1, size, 0, 5 * size + 3, 700, 333]
    return {
        "token": [7, 2, 0, 1, 5, 4],
        "attended_len": lengths,
        "overwrites": [0, 0, 0, 1, 1, 0],
        "selects": [0, 1, 0, 1, 1, 1],
        "logical_start": [n + 5 for n in lengths],
        "recent_start": [0, size, 0, 4 * size, max(lengths[4] - 9, 0), 300],
        "num_sinks": [0, 0, 0, 0, 4, 1],
        "scores": [1, 1, 0, 1, 1, 0],
    }


def check_decode(kernels: Kernels, shape: Shape, scoring: Scoring) -> None:
    """Compare one step of these requests: outputs, scores, victims, tokens, and nothing else."""
    fields = decode_fields(shape)
    lengths, num = fields["attended_len"], len(fields["attended_len"])
    pool = Pool(shape, lengths)
    batch = decode_batch(pool.block_table, **fields)
    tensors = pool.tensors(9)
    victims = torch.full((pool.cache.num_blocks, shape.num_kv_heads), -7, dtype=torch.int32)
    for b in (3, 4):
        for h in range(shape.num_kv_heads):
            victims[batch.first_block_ids[b], h] = random.randrange(lengths[b])
    taken = victims.clone()
    before = pool.before()
    kernels.decode(pool.cache, batch, victims, tensors, scoring)
    writable = torch.zeros_like(pool.cache.score, dtype=torch.bool)
    assert (tensors.out[0] == 0).all() and tensors.out[[3, 6, 8]].isnan().all()
    now, pool.cache = pool.cache, before
    for b, length in enumerate(lengths):
        for h in range(shape.num_kv_heads if length else 0):
            at = pool.at(b, h, length)
            writable[at] = True
            request = {name: values[b] for name, values in fields.items()}
            slot = int(taken[batch.first_block_ids[b], h])
            slot = slot if request["overwrites"] else length - 1
            strip = Strip64.of(pool, b, h, length)
            outputs, score = decode64(strip, tensors, shape, h, slot, request, scoring)
            heads = slice(h * shape.group, (h + 1) * shape.group)
            close(tensors.out[request["token"], heads], outputs, TOLERANCE[shape.dtype])
            close(now.score[at], score, 1e-5)
            assert torch.equal(now.key[at].double(), strip.key)
            assert torch.equal(now.position[at].long(), strip.position)
            if request["selects"]:
                victim = int(victims[batch.first_block_ids[b], h])
                check_victim(victim, strip, score, request, scoring)
    unchanged(before, now, writable)
    selected = [
        int(batch.first_block_ids[b]) for b in range(num) if fields["selects"][b] and lengths[b]
    ]
    others = [block for block in range(len(victims)) if block not in selected]
    assert torch.equal(victims[others], taken[others])


def decode64(
    strip: Strip64,
    tensors: StepTensors,
    shape: Shape,
    head: int,
    slot: int,
    request: dict[str, int],
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store a new token in a strip; its outputs [G, D] and the strip's scores [L]."""
    token, position = request["token"], request["logical_start"]
    strip.key[slot] = tensors.key[token, head].double()
    strip.value[slot] = tensors.value[token, head].double()
    strip.score[slot], strip.position[slot] = 0.0, position
    seen = torch.ones(1, len(strip.score), dtype=torch.bool)
    heads = slice(head * shape.group, (head + 1) * shape.group)
    outputs, probs = attend64(strip, tensors.query[token, None, heads], seen, shape.scale)
    return outputs[0], strip.score + sums64(probs, scoring.power) * request["scores"]


def check_victim(
    slot: int,
    strip: Strip64,
    score: torch.Tensor,
    request: dict[str, int],
    scoring: Scoring,
) -> None:
    """Compare with the lowest of the candidates, as far as float32 can tell them apart."""
    able = (strip.position >= request["num_sinks"]) & (strip.position < request["recent_start"])
    if scoring.by_age:
        score = score / (request["logical_start"] + 1 - strip.position)
    if able.any():
        assert able[slot]
        lowest = score[able].min()
        assert score[slot] <= lowest + 1e-5 * score.abs().max(), (slot, score[slot], lowest)


@every_variant
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("name", SHAPES)
def test_decode_equals_float64(name: str, num_threads: int, variant: str) -> None:
    """Outputs, scores, victims and stored tokens; nothing else is written."""
    torch.manual_seed(num_threads)
    random.seed(num_threads)
    with threads(num_threads):
        check_decode(loader.load(variant), SHAPES[name], Scoring())


@every_variant
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("name", ["groups of 1", "pages of 5", "pages of 128", "pages of 1"])
def test_scorings_equal_float64(name: str, scoring: str, num_threads: int, variant: str) -> None:
    """The same for each form of scoring."""
    torch.manual_seed(1)
    random.seed(1)
    with threads(num_threads):
        check_decode(loader.load(variant), SHAPES[name], SCORINGS[scoring])


@every_variant
@pytest.mark.parametrize("num_threads", [2, 3, 7])
@pytest.mark.parametrize("lengths", [[4000], [3000, 64, 2000], [40] * 9])
def test_cuts_do_not_matter(lengths: list[int], num_threads: int, variant: str) -> None:
    """A strip in several splits has the outputs, scores and victims of one in one split."""
    shape = Shape(3, 3, 64, 16, BF16)
    results = []
    for number in (1, num_threads):
        torch.manual_seed(0)
        pool = Pool(shape, lengths)
        batch = decode_batch(
            pool.block_table,
            token=list(range(len(lengths))),
            attended_len=lengths,
            selects=[1] * len(lengths),
            logical_start=lengths,
            recent_start=[n // 2 for n in lengths],
            scores=[1] * len(lengths),
        )
        victims = torch.zeros(pool.cache.num_blocks, 3, dtype=torch.int32)
        tensors = pool.tensors(len(lengths))
        tensors = replace(tensors, out=torch.zeros(tensors.query.shape))
        with threads(number):
            loader.load(variant).decode(pool.cache, batch, victims, tensors, Scoring())
        results.append((tensors.out, pool.cache.score.nan_to_num(0), victims))
    close(results[1][0], results[0][0].double(), 1e-5)
    close(results[1][1], results[0][1].double(), 1e-6)
    assert torch.equal(results[0][2], results[1][2])


def prompt_pool(shape: Shape) -> tuple[Pool, list[PromptChunk]]:
    """Chunks of three prompts: a whole one, one after others, and a single token."""
    starts, counts = [0, 75, 30], [133, 50, 1]
    pool = Pool(shape, [s + c for s, c in zip(starts, counts, strict=True)])
    for view in (pool.cache.key, pool.cache.value, pool.cache.score):
        view.fill_(torch.nan)
    chunks, token = [], 2
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for h in range(shape.num_kv_heads):
            pool.fill(b, h, start)
            # Packed tokens have gaps between their positions, other ones in each head.
            gaps = (torch.rand(start) * 3).long() + 1
            pool.cache.position[pool.at(b, h, start)] = gaps.cumsum(0).int()
        tokens = slice(token, token + count)
        first = dict.fromkeys(("first_scoring_query", "first_window_query"), 20 if b == 1 else 0)
        rest = {"logical_start": 3 * start, **first}
        chunks.append(prompt_chunk(pool.block_table[b], tokens, start, **rest))
        token += count
    return pool, chunks


def check_prefill(kernels: Kernels, shape: Shape, scoring: Scoring) -> None:
    """Compare these chunks: outputs, scores, stored tokens, and nothing else."""
    pool, chunks = prompt_pool(shape)
    end = chunks[-1].tokens.stop
    tensors, before = pool.tensors(end + 2), pool.before()
    power = scoring.power if scoring.in_prompt else 0
    kernels.prefill(pool.cache, chunks, tensors, scoring)
    assert tensors.out[:2].isnan().all() and tensors.out[end:].isnan().all()
    writable = torch.zeros_like(pool.cache.score, dtype=torch.bool)
    for b, chunk in enumerate(chunks):
        start, tokens, index = chunk.resident_start, chunk.tokens, torch.arange(chunk.num_tokens)
        for h in range(shape.num_kv_heads):
            at = pool.at(b, h, chunk.attended_len)
            writable[at] = True
            strip = Strip64.of(pool, b, h, chunk.attended_len)
            strip.score[:start] = before.score[pool.at(b, h, start)].double()
            strip.score[start:] = 0.0
            assert torch.equal(strip.key[start:], tensors.key[tokens, h].double())
            assert torch.equal(strip.value[start:], tensors.value[tokens, h].double())
            assert torch.equal(strip.position[start:], chunk.logical_start + index)
            seen = torch.arange(chunk.attended_len) <= start + index[:, None]
            heads = slice(h * shape.group, (h + 1) * shape.group)
            outputs, probs = attend64(strip, tensors.query[tokens, heads], seen, tensors.scale)
            close(tensors.out[tokens, heads], outputs, TOLERANCE[shape.dtype])
            score = strip.score + sums64(probs[chunk.first_scoring_query :], power)
            close(pool.cache.score[at], score, 1e-5)
    unchanged(before, pool.cache, writable)


@every_variant
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_prefill_equals_float64(name: str, num_threads: int, variant: str) -> None:
    """Outputs, scores and stored tokens; nothing else is written."""
    torch.manual_seed(num_threads)
    with threads(num_threads):
        check_prefill(loader.load(variant), SHAPES[name], Scoring())


@every_variant
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("name", ["groups of 1", "groups of 3", "pages of 5"])
def test_prefill_with_each_scoring_equals_float64(name: str, scoring: str, variant: str) -> None:
    """The same for each form of scoring."""
    torch.manual_seed(1)
    check_prefill(loader.load(variant), SHAPES[name], SCORINGS[scoring])


def value64(
    strip: Strip64, chunk: PromptChunk, query: torch.Tensor, scale: float, term: Term
) -> torch.Tensor:
    """[L]: a term's value of each token, of queries [T, G, D]."""
    first, length = chunk.first_query(term), chunk.attended_len
    asked = torch.arange(chunk.num_tokens)[first:, None]  # [T', 1]
    seen = torch.arange(length) <= (length if term.sees_later else chunk.resident_start + asked)
    _, probs = attend64(strip, query[first:], seen.expand(len(asked), -1), scale)
    age = chunk.logical_start + asked - strip.position
    each = probs.pow(term.power)
    if term.skip:
        each = each.masked_fill((age < term.skip)[:, None], 0.0)
    value = each.amax(dim=(0, 1)) if term.reduce == "max" else each.sum(dim=(0, 1))
    distance = strip.position[:, None] - strip.position
    reached = (distance >= 0) & (distance <= term.reach)
    return value.expand(length, -1).masked_fill(~reached, 0.0).amax(dim=1)


def check_term(kernels: Kernels, shape: Shape, term: Term, by_age: bool) -> None:
    """Compare scores after a term, in pages or of a window; nothing else is written."""
    pool, chunks = prompt_pool(shape)
    tensors = replace(pool.tensors(chunks[-1].tokens.stop), layer_index=1)
    kernels.prefill(pool.cache, chunks, tensors, Scoring(power=0))
    before, writable = pool.before(), torch.zeros_like(pool.cache.score, dtype=torch.bool)
    lengths = [chunk.attended_len for chunk in chunks]
    windows = [torch.full((3, shape.num_kv_heads, length), torch.nan) for length in lengths]
    outside = [replace(c, window_scores=w) for c, w in zip(chunks, windows, strict=True)]
    kernels.score_term(pool.cache, outside, tensors, term, by_age)
    unchanged(before, pool.cache, writable)
    kernels.score_term(pool.cache, chunks, tensors, term, by_age)
    now, pool.cache = pool.cache, before
    for b, chunk in enumerate(chunks):
        assert windows[b][[0, 2]].isnan().all()
        for h in range(shape.num_kv_heads):
            at = pool.at(b, h, chunk.attended_len)
            strip = Strip64.of(pool, b, h, chunk.attended_len)
            query = tensors.query[chunk.tokens, h * shape.group : (h + 1) * shape.group]
            age = chunk.logical_end - strip.position if by_age else 1
            added = term.weight * age * value64(strip, chunk, query, tensors.scale, term)
            close(windows[b][1, h], added, 1e-5)
            close(now.score[at], strip.score + added, 1e-5)
            writable[at] = True
    for name in ("key", "value", "position"):
        assert torch.equal(bits(getattr(before, name)), bits(getattr(now, name)))
    unchanged(before, now, writable)


@every_variant
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_term_equals_float64(name: str, num_threads: int, variant: str) -> None:
    """Scores of all tokens of a chunk's request; nothing else is written."""
    torch.manual_seed(num_threads)
    with threads(num_threads):
        check_term(loader.load(variant), SHAPES[name], TERMS["window, largest"], by_age=True)


@every_variant
@pytest.mark.parametrize("by_age", [False, True])
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("name", ["groups of 3", "pages of 5"])
def test_term_of_each_kind_equals_float64(name: str, term: str, by_age: bool, variant: str) -> None:
    """The same for each kind of term."""
    torch.manual_seed(1)
    check_term(loader.load(variant), SHAPES[name], TERMS[term], by_age)


@every_variant
@pytest.mark.parametrize("by_age", [False, True])
@pytest.mark.parametrize("by_page", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_packing_equals_torch_exactly(name: str, by_page: bool, by_age: bool, variant: str) -> None:
    """Survivors, ties among few different scores, and all other slots, are torch's exactly."""
    shape, rng = SHAPES[name], random.Random(name)
    lengths = [60, 7, 200]
    pools = [Pool(shape, lengths) for _ in range(3)]
    for pool in pools:
        pool.cache.score.copy_(torch.randint(0, 3, pool.cache.score.shape) / 2.0)
    chunks = []
    for b, length in enumerate(lengths):
        recent, sinks = rng.choice([(5, 0), (0, 4), (3, 3), (0, 0)])
        limits = {
            "num_survivors": rng.randrange(recent + sinks + 1, length - 1) if length > 7 else 6,
            "recent_start": length - min(recent, 3),
            "num_sinks": min(sinks, 2),
        }
        if by_page and length > 2 * shape.block_size:
            evicted = rng.randrange(1, length // shape.block_size) * shape.block_size
            limits["num_survivors"] = length - evicted
        # Tables are the same for all layers.
        chunks.append(prompt_chunk(pools[0].block_table[b], slice(0, 1), length - 1, **limits))
        for pool, h in product(pools if by_age else (), range(shape.num_kv_heads)):
            at = pool.at(b, h, length)
            pool.cache.score[at] *= length - pool.cache.position[at]  # ranks are few again
    twins, scoring = [pool.before() for pool in pools], Scoring(by_age=by_age, by_page=by_page)
    with threads(2):
        loader.load(variant).pack_survivors([pool.cache for pool in pools], chunks, scoring)
    TorchKernels().pack_survivors(twins, chunks, scoring)
    for pool, twin in zip(pools, twins, strict=True):
        unchanged(twin, pool.cache, torch.zeros_like(twin.score, dtype=torch.bool))
