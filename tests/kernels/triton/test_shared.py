# SPDX-License-Identifier: Apache-2.0
"""Pages that others read, in Triton: scored outside of them, and survivors copied out of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch

from tests.kernels.harness import Shape, empty_cache, views
from vllm_h2o.kernels.batch import PromptChunk, Scoring, StepTensors
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.torch import pack
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.kernels.triton import pack as triton_pack
from vllm_h2o.kernels.triton import share
from vllm_h2o.kernels.triton.kernels import TritonKernels
from vllm_h2o.policy import Term

SHAPE = Shape(num_kv_heads=3, group=2, head_size=32, block_size=8)
BLOCKS, LENGTHS = ([5, 2, 8, 1, 20, 21, 22, 3], [9, 4, 7, 0, 6, 30, 31, 11]), (61, 37)
NUM_BLOCKS = 40
PAGES = ("key", "value", "score", "position")


def filled(kinds: tuple[bool, bool] = (False, False)) -> LayerCache:
    """Pages of two prompts."""
    kv_cache = empty_cache(SHAPE, NUM_BLOCKS, extra_words=kinds[1])
    cache = views(kv_cache, SHAPE, *kinds)
    for blocks, length in zip(BLOCKS, LENGTHS, strict=True):
        whole = PromptChunk(
            tokens=slice(0, length),
            block_table=torch.tensor(blocks, dtype=torch.int32),
            resident_start=0,
            logical_start=0,
            first_scoring_query=length,
        )
        query = torch.zeros(length, 6, 32)
        key, value = torch.randn(2, length, 3, 32)
        step = StepTensors(query, key, value, torch.empty_like(query), 1.0)
        TorchKernels().prefill(cache, [whole], step, Scoring())
        rows = cache.rows(torch.tensor(blocks)[: -(-length // 8)])
        cache.score[rows] = torch.rand(*rows.shape, 8)
    return cache


def twin(cache: LayerCache) -> LayerCache:
    """The same, elsewhere."""
    names = ("key", "value", "score", "position", "first_rows", "mass")
    own = {name: getattr(cache, name) for name in names}
    return replace(cache, **{k: v if v is None else v.clone() for k, v in own.items()})


def kernels() -> TritonKernels:
    """The kernels of such layers."""
    return TritonKernels(torch.device("cpu"), 4, 6, 3, 32)


@pytest.mark.parametrize("by_age", [False, True])
@pytest.mark.parametrize(
    "term",
    [
        Term("window", "sum", weight=0.5),
        Term("window", "max", reach=12),
        Term("window", "max", power=2, weight=0.3, reach=5, skip=4),
    ],
    ids=str,
)
def test_window_scores_apart_equal_torch(term: Term, by_age: bool) -> None:
    """The values of a term are torch's, stored apart for each chunk that has window scores; scores
    of its pages stay as they were, and those of another chunk are added to.
    """
    torch.manual_seed(1)
    cache, query, found = filled(), torch.randn(60, 6, 32), []
    for computes in (TorchKernels(), kernels()):
        own, chunks, start = twin(cache), [], 0
        for blocks, length, num, first in zip(BLOCKS, LENGTHS, (41, 19), (30, 4), strict=True):
            chunk = PromptChunk(
                tokens=slice(start, start + num),
                block_table=torch.tensor(blocks, dtype=torch.int32),
                resident_start=length - num,
                logical_start=length - num,
                first_window_query=first,
                window_scores=torch.full((2, 3, length), torch.nan) if start == 0 else None,
            )
            chunks.append(chunk)
            start += num
        step = StepTensors(query, query, query, query, 0.2, layer_index=1)
        computes.score_term(own, chunks, step, term, by_age)
        scores = chunks[0].window_scores
        assert scores is not None and scores[0].isnan().all()
        found.append((scores[1], own))
    (expected, by_torch), (scores, by_triton) = found
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)
    first, last = (torch.tensor(blocks)[:5, None] * 3 + torch.arange(3) for blocks in BLOCKS)
    assert torch.equal(by_triton.score[first], cache.score[first])
    assert not torch.equal(by_triton.score[last], cache.score[last])
    torch.testing.assert_close(by_triton.score[last], by_torch.score[last], equal_nan=True)


def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How far each table of a launch is from where 16 bytes begin, launch by launch."""
    found: list[int] = []

    class Launch:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                tables = [a for a in args if torch.is_tensor(a) and a.dtype == torch.int32]
                found.extend(table.data_ptr() % 16 for table in tables)
                self.kernel[grid](*args, **options)

            return launch

    for module, name in (
        (triton_pack, "select_survivors"),
        (triton_pack, "pack_survivors"),
        (share, "count_best"),
        (share, "share_rows"),
        (share, "move_shared"),
    ):
        monkeypatch.setattr(module, name, Launch(getattr(module, name)))
    return found


def test_scores_that_are_read_are_let_go() -> None:
    """The window scores of a prompt are free once its survivors are copied."""
    cache, own = filled(), kernels()
    chunk = PromptChunk(
        tokens=slice(0, 20),
        block_table=torch.tensor(BLOCKS[0], dtype=torch.int32),
        resident_start=41,
        logical_start=41,
        num_survivors=31,
        recent_start=52,
        window_scores=torch.zeros(1, 3, 61),
        destination_blocks=torch.tensor([36, 33, 38, 12], dtype=torch.int32),
    )
    query, (key, value) = torch.randn(20, 6, 32), torch.randn(2, 20, 3, 32)
    step, scoring = StepTensors(query, key, value, torch.empty_like(query), 1.0), Scoring()
    own.score_term(cache, [chunk], step, Term("window"), by_age=False)
    assert chunk.window_scores is not None
    own.copy_survivors([cache], chunk, scoring, chunk.window_scores)
    scores = ref(chunk.window_scores)
    del chunk
    assert scores() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "splits", "scoring", "num_survivors"),
    [
        ((False, False), False, Scoring(), 31),
        ((False, False), False, Scoring(by_age=True), LENGTHS[0]),
        ((False, True), False, Scoring(by_age=True), 31),
        ((True, True), True, Scoring(by_age=True), 31),
        ((True, False), True, Scoring(), 31),
        ((False, False), False, Scoring(by_page=True), 37),
        ((False, True), False, Scoring(by_age=True, by_page=True), 45),
    ],
)
def test_survivors_are_copied(
    kinds: tuple[bool, bool],
    splits: bool,
    scoring: Scoring,
    num_survivors: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's, of every layer; the pages they leave, and all others, are not touched."""
    torch.manual_seed(2)
    length = LENGTHS[0]
    destination = [36, 33, 38, 12, 13, 14, 15, 16]
    chunk = PromptChunk(
        tokens=slice(0, 20),
        block_table=torch.tensor(BLOCKS[0], dtype=torch.int32),
        resident_start=length - 20,
        logical_start=length - 20,
        num_survivors=num_survivors,
        recent_start=length - 9,
        num_sinks=3,
        destination_blocks=torch.tensor(destination[: -(-num_survivors // 8)], dtype=torch.int32),
        splits=splits,
    )
    # A part of a row of the block table, as it is in an engine.
    odd = torch.tensor([99, *chunk.destination_blocks.tolist()], dtype=torch.int32)[1:]
    chunk = replace(chunk, destination_blocks=odd)
    caches = [filled(kinds) for _ in range(2)]
    scores = torch.rand(2, 3, length) * torch.tensor([1.0, 0.3, 1.5])[:, None]
    scores[1, 0, 10:40] = 0.5  # of equals the older
    others = [twin(cache) for cache in caches]
    for cache, score in zip(others, scores.clone(), strict=True):
        pack.pack_survivors(cache, chunk, scoring, score)
    launched = launches(monkeypatch)
    kernels().copy_survivors(caches, chunk, scoring, scores)
    # None that is less aligned than the rehearsal's, which would be another kernel to compile.
    assert set(launched) == {0} and odd.data_ptr() % 16
    assert chunk.destination_blocks is not None
    whole = torch.tensor(destination)[: num_survivors // 8, None] * 3 + torch.arange(3)
    for found, expected in zip(caches, others, strict=True):
        if splits:
            assert found.first_rows is not None and expected.first_rows is not None
            assert torch.equal(found.first_rows, expected.first_rows)
            assert not torch.equal(*found.first_rows[36].diff()[:2])
        for name in PAGES:
            one, other = (getattr(cache, name).nan_to_num(-1.0) for cache in (found, expected))
            assert torch.equal(one, other), name
        if found.mass is not None:
            assert (found.mass[whole] == 1.0).all()
