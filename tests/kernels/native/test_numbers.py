"""Each native variant against float64: odd shapes, threads, poison, every form of scoring."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.kernels.harness import Shape
from tests.kernels.native.cases import Pool, Strip64, attend64, decode_batch, prompt_chunk, threads
from tests.kernels.truth import bits
from vllm_h2o.kernels.batch import Scoring
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.native import kernels as native
from vllm_h2o.kernels.torch.kernels import TorchKernels

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
VARIANTS = native.available()
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
    "old ones": Scoring(skip_recent=7),
    "pages": Scoring(by_page=True),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    """Differs from float64 by no more than that, relative to the largest."""
    assert not ours.isnan().any()
    apart = (ours.double() - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)
    assert apart <= tolerance, f"{float(apart):.3g} > {tolerance}"


def unchanged(before: LayerCache, after: LayerCache, writable: torch.Tensor) -> None:
    """Slots that are not writable, [rows, N] bool, hold the bits that they held."""
    for name in ("key", "value", "score", "position"):
        changed = bits(getattr(before, name)) != bits(getattr(after, name))
        changed = changed if changed.dim() == 2 else changed.any(-1)
        assert not (changed & ~writable).any(), name


def decode_orders(shape: Shape, scoring: Scoring) -> dict[str, list[int]]:
    """Requests of many lengths, some of which overwrite, some select, one is padding."""
    size = shape.block_size
    lengths = [1, size, 0, 5 * size + 3, 700, 333]
    if scoring.by_page:
        lengths = [1, 3 * size, 0, 9 * size, 8 * size + 2, 0]
    refills = scoring.by_page and size > 1
    return {
        "token": [7, 2, 0, 1, 5, 4],
        "attended_len": lengths,
        "overwrites": [0, 0, 0, 1, 1, 0],
        "next_offset": [0, 0, 0, 1 if refills else 0, 0, 0],
        "num_free_slots": [0, 0, 0, size - 2 if refills else 0, 0, 0],
        "selects": [0, 1, 0, 0 if refills else 1, 1, 1],
        "position": [n + 5 for n in lengths],
        "recent_from": [0, size, 0, 4 * size, max(lengths[4] - 9, 0), 300],
        "num_sinks": [0, 0, 0, 0, 4, 1],
        "scores": [1, 1, 0, 1, 1, 0],
    }


def check_decode(kernels: native.NativeKernels, shape: Shape, scoring: Scoring) -> None:
    """One step of such requests: outputs, scores, victims, stored tokens, and nothing else."""
    size, orders = shape.block_size, decode_orders(shape, scoring)
    lengths, num = orders["attended_len"], len(orders["attended_len"])
    pool = Pool(shape, lengths)
    batch = decode_batch(pool.table, **orders)
    query, key, value = pool.tokens(9)
    victims = torch.full((pool.page.num_blocks, shape.num_kv_heads), -7, dtype=torch.int32)
    for b in (3, 4):
        for h in range(shape.num_kv_heads):
            whole = random.randrange(lengths[b] // size) * size
            slot = whole if scoring.by_page else random.randrange(lengths[b])
            victims[batch.first_block_ids[b], h] = slot
    taken = victims.clone()
    first = torch.rand(9, shape.num_kv_heads)
    out = torch.full(query.shape, torch.nan, dtype=shape.dtype)
    before = LayerCache.of(pool.cache.clone(), shape.head_size)
    step = (query, key, value, first)
    kernels.decode(pool.page, batch, victims, *step, shape.head_size**-0.5, scoring, out)
    writable = torch.zeros_like(pool.page.score, dtype=torch.bool)
    assert (out[0] == 0).all() and out[[3, 6, 8]].isnan().all()
    now, pool.page = pool.page, before
    for b, length in enumerate(lengths):
        for h in range(shape.num_kv_heads if length else 0):
            at = pool.at(b, h, length)
            writable[at] = True
            order = {name: values[b] for name, values in orders.items()}
            slot = int(taken[batch.first_block_ids[b], h]) + order["next_offset"]
            slot = slot if order["overwrites"] else length - 1
            strip = Strip64.of(pool, b, h, length)
            token = order["token"]
            strip.key[slot], strip.value[slot] = key[token, h].double(), value[token, h].double()
            strip.score[slot], strip.position[slot] = first[token, h], order["position"]
            seen = torch.ones(1, length, dtype=torch.bool)
            seen[:, slot + 1 : slot + 1 + order["num_free_slots"]] = False
            heads = slice(h * shape.group, (h + 1) * shape.group)
            asked = torch.tensor([order["position"]])
            scale = shape.head_size**-0.5
            outputs, given = attend64(strip, query[token, None, heads], seen, asked, scale, scoring)
            close(out[token, heads], outputs[0], TOLERANCE[shape.dtype])
            score = strip.score + given[0] * order["scores"]
            close(now.score[at], score, 1e-5)
            assert torch.equal(now.key[at].double(), strip.key)
            assert torch.equal(now.position[at].long(), strip.position)
            if order["selects"]:
                check_victim(
                    int(victims[batch.first_block_ids[b], h]), strip, score, order, size, scoring
                )
    unchanged(before, now, writable)
    selected = [
        int(batch.first_block_ids[b]) for b in range(num) if orders["selects"][b] and lengths[b]
    ]
    others = [block for block in range(len(victims)) if block not in selected]
    assert torch.equal(victims[others], taken[others])


def check_victim(
    slot: int,
    strip: Strip64,
    score: torch.Tensor,
    order: dict[str, int],
    block_size: int,
    scoring: Scoring,
) -> None:
    """The lowest of the candidates, unless float32 cannot tell it from the lowest."""
    able = (strip.position >= order["num_sinks"]) & (strip.position < order["recent_from"])
    if scoring.by_page:
        whole = len(able) // block_size * block_size
        able = able[:whole].view(-1, block_size).all(1)
        score, slot = score[:whole].view(-1, block_size).sum(1), slot // block_size
    if able.any():
        assert able[slot]
        lowest = score[able].min()
        assert score[slot] <= lowest + 1e-5 * score.abs().max(), (slot, score[slot], lowest)


@every_variant
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("name", SHAPES)
def test_decode(name: str, num_threads: int, variant: str) -> None:
    """Outputs, scores, victims and stored tokens; nothing else is written."""
    torch.manual_seed(num_threads)
    random.seed(num_threads)
    with threads(num_threads):
        check_decode(native.load(variant), SHAPES[name], Scoring())


@every_variant
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("name", ["groups of 1", "pages of 5", "pages of 128", "pages of 1"])
def test_decode_scoring(name: str, scoring: str, num_threads: int, variant: str) -> None:
    """The same for each form of scoring; a hole behind a page's first tokens is not attended to."""
    torch.manual_seed(1)
    random.seed(1)
    with threads(num_threads):
        check_decode(native.load(variant), SHAPES[name], SCORINGS[scoring])


@every_variant
@pytest.mark.parametrize("num_threads", [2, 3, 7])
@pytest.mark.parametrize("lengths", [[4000], [3000, 64, 2000], [40] * 9])
def test_cuts_do_not_matter(lengths: list[int], num_threads: int, variant: str) -> None:
    """A strip that threads share has the outputs, scores and victims of one that one thread has."""
    shape = Shape(3, 3, 64, 16, BF16)
    results = []
    for number in (1, num_threads):
        torch.manual_seed(0)
        pool = Pool(shape, lengths)
        batch = decode_batch(
            pool.table,
            token=list(range(len(lengths))),
            attended_len=lengths,
            selects=[1] * len(lengths),
            position=lengths,
            recent_from=[n // 2 for n in lengths],
            scores=[1] * len(lengths),
        )
        victims = torch.zeros(pool.page.num_blocks, 3, dtype=torch.int32)
        query, key, value = pool.tokens(len(lengths))
        out = torch.zeros(query.shape)
        with threads(number):
            kernels = native.load(variant)
            step = (query, key, value, None)
            kernels.decode(pool.page, batch, victims, *step, 0.3, Scoring(), out)
        scores = pool.page.score.nan_to_num(0)
        results.append((out, scores, victims))
    close(results[1][0], results[0][0].double(), 1e-5)
    close(results[1][1], results[0][1].double(), 1e-6)
    assert torch.equal(results[0][2], results[1][2])


def check_prefill(kernels: native.NativeKernels, shape: Shape, scoring: Scoring) -> None:
    """Chunks of three prompts: a whole one, one behind others, and a single token."""
    starts, counts = [0, 75, 30], [133, 50, 1]
    pool = Pool(shape, starts)
    needs = [-(-(s + c) // shape.block_size) for s, c in zip(starts, counts, strict=True)]
    wider = Pool(shape, [s + c for s, c in zip(starts, counts, strict=True)])
    wider.page.key.fill_(torch.nan), wider.page.value.fill_(torch.nan)
    wider.page.score.fill_(torch.nan)
    for b, start in enumerate(starts):
        for h in range(shape.num_kv_heads):
            wider.fill(b, h, start)
            # What has been packed has gaps between its positions, other ones in each head.
            gaps = (torch.rand(start) * 3).long() + 1
            wider.page.position[wider.at(b, h, start)] = gaps.cumsum(0).int()
    pool, total = wider, sum(counts)
    query, key, value = pool.tokens(total + 4)
    first = torch.rand(total + 4, shape.num_kv_heads)
    chunks, token = [], 2
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        tokens = slice(token, token + count)
        rest = {"position": 3 * start, "scores_from": 20 if b == 1 else 0}
        chunks.append(prompt_chunk(pool.table[b], tokens, start, **rest))
        token += count
    assert needs
    out = torch.full(query.shape, torch.nan, dtype=shape.dtype)
    before = LayerCache.of(pool.cache.clone(), shape.head_size)
    scale = shape.head_size**-0.5
    kernels.prefill(pool.page, chunks, query, key, value, first, scale, scoring, out)
    assert out[:2].isnan().all() and out[2 + total :].isnan().all()
    writable = torch.zeros_like(pool.page.score, dtype=torch.bool)
    for b, chunk in enumerate(chunks):
        for h in range(shape.num_kv_heads):
            at = pool.at(b, h, chunk.end)
            writable[at] = True
            strip = Strip64.of(pool, b, h, chunk.end)
            tokens = chunk.tokens
            strip.score[: chunk.start] = before.score[pool.at(b, h, chunk.start)].double()
            strip.score[chunk.start :] = first[tokens, h].double()
            assert torch.equal(strip.key[chunk.start :], key[tokens, h].double())
            assert torch.equal(strip.value[chunk.start :], value[tokens, h].double())
            asked = chunk.position + torch.arange(chunk.num_tokens)
            assert torch.equal(strip.position[chunk.start :], asked)
            seen = torch.arange(chunk.end) <= chunk.start + torch.arange(chunk.num_tokens)[:, None]
            heads = slice(h * shape.group, (h + 1) * shape.group)
            outputs, given = attend64(strip, query[tokens, heads], seen, asked, scale, scoring)
            close(out[tokens, heads], outputs, TOLERANCE[shape.dtype])
            close(pool.page.score[at], strip.score + given[chunk.scores_from :].sum(0), 1e-5)
    unchanged(before, pool.page, writable)


@every_variant
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_prefill(name: str, num_threads: int, variant: str) -> None:
    """Outputs, scores and stored tokens; nothing else is written."""
    torch.manual_seed(num_threads)
    with threads(num_threads):
        check_prefill(native.load(variant), SHAPES[name], Scoring())


@every_variant
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("name", ["groups of 1", "groups of 3", "pages of 5"])
def test_prefill_scoring(name: str, scoring: str, variant: str) -> None:
    """The same for each form of scoring."""
    torch.manual_seed(1)
    check_prefill(native.load(variant), SHAPES[name], SCORINGS[scoring])


@every_variant
@pytest.mark.parametrize("by_page", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_packing(name: str, by_page: bool, variant: str) -> None:
    """Survivors, ties among few different scores, and what is not written, are torch's exactly."""
    shape, rng = replace(SHAPES[name], dtype=SHAPES[name].dtype), random.Random(name)
    lengths = [60, 7, 200]
    pages = [Pool(shape, lengths) for _ in range(3)]
    chunks = []
    for b, length in enumerate(lengths):
        recent, sinks = rng.choice([(5, 0), (0, 4), (3, 3), (0, 0)])
        keep = rng.randrange(recent + sinks + 1, length - 1) if length > 7 else 6
        limits = {"keep": keep, "recent_from": length - min(recent, 3), "num_sinks": min(sinks, 2)}
        # Tables are the same for all layers.
        chunks.append(prompt_chunk(pages[0].table[b], slice(0, 1), length - 1, **limits))
    for pool in pages:
        pool.page.score.copy_(torch.randint(0, 3, pool.page.score.shape) / 2.0)
    twins = [LayerCache.of(pool.cache.clone(), shape.head_size) for pool in pages]
    scoring = Scoring(by_page=by_page)
    with threads(2):
        native.load(variant).pack_survivors([pool.page for pool in pages], chunks, scoring)
    TorchKernels().pack_survivors(twins, chunks, scoring)
    for pool, twin in zip(pages, twins, strict=True):
        unchanged(twin, pool.page, torch.zeros_like(twin.score, dtype=torch.bool))
