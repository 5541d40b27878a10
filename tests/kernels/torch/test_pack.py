"""Survivors that leave pages which others read: scored outside of them, copied out of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.harness import Shape, empty_cache
from vllm_h2o.kernels.batch import PromptChunk, Scoring, ScoringPass
from vllm_h2o.kernels.cache import LayerCache, cache_rows
from vllm_h2o.kernels.reference import attend_and_score, pack_survivors, reached, score_pass
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.kernels.torch import pack, prefill, scoring_pass

SHAPE = Shape(num_kv_heads=2, group=3, head_size=64, block_size=16)
BLOCKS, LENGTH, NUM_SURVIVORS = [5, 2, 8, 1], 57, 31
VIEWS = ("key", "value", "score", "position")


def shared(
    destination: list[int] | None, num_tokens: int, first_window_query: int
) -> tuple[LayerCache, PromptChunk]:
    """A prompt in its pages, whose last chunk is to be packed."""
    torch.manual_seed(3)
    cache = LayerCache.of(empty_cache(SHAPE, 12), SHAPE.head_size)
    chunk = PromptChunk(
        tokens=slice(4, 4 + num_tokens),
        block_table=torch.tensor(BLOCKS, dtype=torch.int32),
        resident_start=LENGTH - num_tokens,
        logical_start=LENGTH - num_tokens,
        num_survivors=NUM_SURVIVORS,
        recent_start=LENGTH - 12,
        num_sinks=3,
        first_scoring_query=num_tokens,
        first_window_query=first_window_query,
        destination_blocks=(
            None if destination is None else torch.tensor(destination, dtype=torch.int32)
        ),
    )
    whole = PromptChunk(
        tokens=slice(0, LENGTH), block_table=chunk.block_table, resident_start=0, logical_start=0
    )
    key, value = torch.randn(2, LENGTH, 2, 64)
    prefill.store(cache, whole, key, value, None)
    return cache, chunk


def strips(cache: LayerCache, blocks: list[int], num_slots: int) -> list[Strip]:
    """What each head holds in the first slots of some pages, in float64."""
    rows = cache_rows(torch.tensor(blocks), 2)
    views = [getattr(cache, name)[rows].flatten(1, 2)[:, :num_slots] for name in VIEWS]
    key, value, score, position = views
    return [
        Strip(key[h].double(), value[h].double(), score[h].double(), position[h].long())
        for h in range(2)
    ]


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("by_maximum", [False, True])
@pytest.mark.parametrize("skip_recent", [0, 5])
@pytest.mark.parametrize(("num_tokens", "first_window_query"), [(57, 25), (57, 0), (20, 0), (1, 0)])
def test_window_scores(
    power: int,
    by_maximum: bool,
    skip_recent: int,
    num_tokens: int,
    first_window_query: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference's, in tiles of any size; the pages stay as they were."""
    cache, chunk = shared([3, 4], num_tokens, first_window_query)
    query = torch.randn(num_tokens, 6, 64)
    before = cache.score.clone()
    for tile in (7, prefill.QUERY_TILE):
        monkeypatch.setattr(prefill, "QUERY_TILE", tile)
        scoring = Scoring(power, skip_recent, by_maximum=by_maximum)
        found = prefill.column_scores(cache, chunk, query, 0.2, scoring, first_window_query)
        for head, strip in enumerate(strips(cache, BLOCKS, LENGTH)):
            own = query.double().unflatten(1, (2, 3))[:, head]
            limits = (power, skip_recent, first_window_query, by_maximum)
            attend_and_score(own, strip, 0.2, *limits)
            torch.testing.assert_close(found[head].double(), strip.score, rtol=1e-5, atol=1e-6)
    assert torch.equal(cache.score.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(
    ("rotated", "block", "skip_recent"),
    [(False, 0, 0), (False, 0, 6), (True, 0, 0), (True, 40, 0), (True, 3, 0)],
)
@pytest.mark.parametrize(
    ("by_maximum", "reach", "power"), [(False, 0, 1), (True, 0, 2), (True, 8, 2)]
)
@pytest.mark.parametrize(("num_tokens", "first_query"), [(57, 0), (20, 0), (20, 9), (20, 20)])
def test_score_pass(
    rotated: bool,
    block: int,
    skip_recent: int,
    by_maximum: bool,
    reach: int,
    power: int,
    num_tokens: int,
    first_query: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference's, in tiles of any size; slots after the chunk's stay as they were."""
    query = torch.randn(4 + num_tokens, 6, 64)
    reach = 0 if block else reach
    limits = {"block": block, "skip_recent": skip_recent}
    which = ScoringPass(0.7, rotated, by_maximum, reach, power, **limits).in_pages(16)
    for tile in (7, prefill.QUERY_TILE):
        monkeypatch.setattr(prefill, "QUERY_TILE", tile)
        cache, chunk = shared(None, num_tokens, first_query)
        chunk = replace(chunk, first_scoring_query=first_query)
        before = strips(cache, BLOCKS, 64)
        for part in chunk.in_blocks(which):
            scoring_pass.score(cache, part, query[part.tokens], 0.2, which)
        for head, strip in enumerate(strips(cache, BLOCKS, LENGTH)):
            expected = Strip(*(getattr(before[head], name)[:LENGTH] for name in VIEWS))
            own = query[chunk.tokens].double().unflatten(1, (2, 3))[:, head]
            if first_query < num_tokens:
                score_pass(own[first_query:], expected, 0.2, which, None)
            torch.testing.assert_close(strip.score, expected.score, rtol=1e-5, atol=1e-6)
            after = strips(cache, BLOCKS, 64)[head].score[LENGTH:]
            torch.testing.assert_close(after, before[head].score[LENGTH:], equal_nan=True)


def test_passes_that_make_no_sense() -> None:
    """Blocks that reach, or of queries that are not rotated; rotated ones that leave tokens out."""
    for given in ({"rotated": True, "reach": 3}, {"rotated": False}):
        with pytest.raises(ValueError, match="only a rotated pass without a reach"):
            ScoringPass(0.7, block=16, **given)
    with pytest.raises(ValueError, match="older than no token"):
        ScoringPass(0.7, rotated=True, skip_recent=16)


@pytest.mark.parametrize("reach", [0, 8])
@pytest.mark.parametrize("has_own_scores", [False, True])
def test_survivors_are_copied(has_own_scores: bool, reach: int) -> None:
    """They are those of a prompt packed in place; the pages they leave are not touched."""
    scores = torch.rand(2, LENGTH)
    destination = [7, 10]
    cache, chunk = shared(destination, 20, 0)
    before = strips(cache, BLOCKS, LENGTH)
    scoring = Scoring(reach=reach)
    pack.pack_survivors(cache, chunk, scoring, scores if has_own_scores else None)
    for head, (left, strip) in enumerate(zip(before, strips(cache, BLOCKS, LENGTH), strict=True)):
        assert all(torch.equal(getattr(left, name), getattr(strip, name)) for name in VIEWS)
        if has_own_scores:
            strip.score = scores[head].double()
        strip.score = reached(strip.score, strip.position, reach)
        expected = pack_survivors(strip, LENGTH, NUM_SURVIVORS, 12, 3)
        copied = strips(cache, destination, NUM_SURVIVORS)[head]
        for name in VIEWS:
            assert torch.equal(getattr(copied, name), getattr(expected, name)), name
    others = [block for block in range(12) if block not in (*BLOCKS, *destination)]
    assert cache.key[cache_rows(torch.tensor(others), 2)].isnan().all()
