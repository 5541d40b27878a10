"""Survivors that leave pages which others read: scored beside them, copied out of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.harness import Shape, empty_cache
from vllm_h2o.kernels.batch import PromptChunk, Scoring, cache_rows
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.reference import Strip, attend_and_score, pack_survivors
from vllm_h2o.kernels.reference import replay as reference_replay
from vllm_h2o.kernels.torch import pack as packing
from vllm_h2o.kernels.torch import prefill as prompt

SHAPE = Shape(num_kv_heads=2, group=3, head_size=64, block_size=16)
BLOCKS, LENGTH, KEEP = [5, 2, 8, 1], 57, 31
VIEWS = ("key", "value", "score", "position")


def shared(
    into: list[int] | None, num_tokens: int, first_window_query: int
) -> tuple[LayerCache, PromptChunk]:
    """A prompt in its pages, whose last chunk is to be packed."""
    torch.manual_seed(3)
    page = LayerCache.of(empty_cache(SHAPE, 12), SHAPE.head_size)
    chunk = PromptChunk(
        slice(4, 4 + num_tokens),
        torch.tensor(BLOCKS, dtype=torch.int32),
        LENGTH - num_tokens,
        LENGTH - num_tokens,
        KEEP,
        LENGTH - 12,
        3,
        0,
        num_tokens,
        first_window_query,
        None if into is None else torch.tensor(into, dtype=torch.int32),
    )
    whole = PromptChunk(slice(0, LENGTH), chunk.table, 0, 0, 0, 0, 0, 0)
    key, value = torch.randn(2, LENGTH, 2, 64)
    prompt.store(page, whole, key, value, None)
    return page, chunk


def strips(page: LayerCache, blocks: list[int], num_slots: int) -> list[Strip]:
    """What each head holds in the first slots of some pages, in float64."""
    rows = cache_rows(torch.tensor(blocks), 2)
    views = [getattr(page, name)[rows].flatten(1, 2)[:, :num_slots] for name in VIEWS]
    key, value, score, position = views
    return [
        Strip(key[h].double(), value[h].double(), score[h].double(), position[h].long())
        for h in range(2)
    ]


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("skip_recent", [0, 5])
@pytest.mark.parametrize(("num_tokens", "first_window_query"), [(57, 25), (57, 0), (20, 0), (1, 0)])
def test_window_scores(
    power: int,
    skip_recent: int,
    num_tokens: int,
    first_window_query: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference's, in tiles of any size; the pages stay as they were."""
    page, chunk = shared([3, 4], num_tokens, first_window_query)
    query = torch.randn(num_tokens, 6, 64)
    before = page.score.clone()
    for tile in (7, packing.QUERY_TILE):
        monkeypatch.setattr(packing, "QUERY_TILE", tile)
        given = packing.window_scores(page, chunk, query, 0.2, Scoring(power, skip_recent))
        for head, strip in enumerate(strips(page, BLOCKS, LENGTH)):
            own = query.double().unflatten(1, (2, 3))[:, head]
            attend_and_score(own, strip, 0.2, power, skip_recent, first_window_query)
            torch.testing.assert_close(given[head].double(), strip.score, rtol=1e-5, atol=1e-6)
    assert torch.equal(page.score.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize(("num_tokens", "scores_from"), [(57, 0), (20, 0), (20, 9), (20, 20)])
def test_replay(
    power: int, num_tokens: int, scores_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference's, in tiles of any size; slots behind the chunk's stay as they were."""
    query = torch.randn(num_tokens, 6, 64)
    for tile in (7, packing.QUERY_TILE):
        monkeypatch.setattr(packing, "QUERY_TILE", tile)
        page, chunk = shared(None, num_tokens, 0)
        chunk = replace(chunk, scores_from=scores_from)
        before = strips(page, BLOCKS, 64)
        packing.replay(page, chunk, query, 0.2, Scoring(power, by_age=True, second_pass=True))
        for head, strip in enumerate(strips(page, BLOCKS, LENGTH)):
            expected = Strip(*(getattr(before[head], name)[:LENGTH] for name in VIEWS))
            own = query.double().unflatten(1, (2, 3))[:, head]
            reference_replay(own[scores_from:], expected, 0.2, power)
            torch.testing.assert_close(strip.score, expected.score, rtol=1e-5, atol=1e-6)
            after = strips(page, BLOCKS, 64)[head].score[LENGTH:]
            torch.testing.assert_close(after, before[head].score[LENGTH:], equal_nan=True)


@pytest.mark.parametrize("given", [False, True])
def test_survivors_are_copied(given: bool) -> None:
    """They are those of a prompt packed in place; the pages they leave are not touched."""
    scores = torch.rand(2, LENGTH)
    into = [7, 10]
    page, chunk = shared(into, 20, 0)
    before = strips(page, BLOCKS, LENGTH)
    packing.pack_survivors(page, chunk, Scoring(), scores if given else None)
    for head, (left, strip) in enumerate(zip(before, strips(page, BLOCKS, LENGTH), strict=True)):
        assert all(torch.equal(getattr(left, name), getattr(strip, name)) for name in VIEWS)
        if given:
            strip.score = scores[head].double()
        expected = pack_survivors(strip, LENGTH, KEEP, 12, 3)
        copied = strips(page, into, KEEP)[head]
        for name in VIEWS:
            assert torch.equal(getattr(copied, name), getattr(expected, name)), name
    others = [block for block in range(12) if block not in (*BLOCKS, *into)]
    assert page.key[cache_rows(torch.tensor(others), 2)].isnan().all()
