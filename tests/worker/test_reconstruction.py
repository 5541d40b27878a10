# SPDX-License-Identifier: Apache-2.0
"""Prompts that are read again: which tokens, where, and what they attend to."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import AttentionMetadata

from vllm_h2o.errors import IntegrityError
from vllm_h2o.kernels.batch import PromptChunk, Scoring, StepTensors
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.policy import Term
from vllm_h2o.worker import reconstruction
from vllm_h2o.worker.reconstruction import Reader, Reconstruction, Rereading, blocks_of

HEADS, GROUP, SIZE, PAGE = 2, 3, 16, 4
TERM = Term("reread", "max", power=2, weight=0.1, block=8)
TABLE = torch.tensor([5, 2, 7, 1, 3, 6], dtype=torch.int32)


def chunk(start: int, stop: int, row: int = 0, skip: int = 0) -> PromptChunk:
    """Tokens [start, stop) of a prompt, in rows from ``row`` on."""
    rows = slice(row, row + stop - start)
    return PromptChunk(
        tokens=rows,
        block_table=TABLE,
        resident_start=start,
        logical_start=start,
        first_scoring_query=skip,
    )


def reading(*prompts: tuple[str, PromptChunk]) -> Reconstruction:
    """Of these prompts, each ranked at its chunk's end, with nobody to read them."""
    each = [(request_id, chunk, chunk.logical_end) for request_id, chunk in prompts]
    blocks = list(blocks_of(each, TERM, PAGE))
    chunks = [each for _, each in prompts]
    return Reconstruction(blocks, chunks, TorchKernels(), TERM, True)


def test_reading_goes_by_blocks_of_the_chunk() -> None:
    """By blocks of 8 tokens, from the chunk's first on; not of a request that fits."""
    found = reading(("a", chunk(0, 10)), ("b", chunk(5, 9, 10, skip=4)), ("c", chunk(5, 18, 14)))
    spans = [(block.request_id, block.start, block.end) for block in found.blocks]
    assert spans == [("a", 0, 8), ("a", 8, 10), ("c", 5, 8), ("c", 8, 16), ("c", 16, 18)]
    rows = [(block.chunk.tokens.start, block.chunk.tokens.stop) for block in found.blocks]
    assert rows == [(0, 8), (8, 10), (10, 13), (13, 21), (21, 23)]
    # The first page, if it is not their own, and the block up to the last token.
    assert [block.chunk.attended_len for block in found.blocks] == [8, 4 + 2, 8, 4 + 8, 4 + 2]


@pytest.mark.parametrize(("most", "starts"), [(64, [8, 10]), (11, [3, 9]), (8, [0, 6])])
def test_reading_positions_follow_each_block(most: int, starts: list[int]) -> None:
    """After each block's end, or as far as positions reach."""
    found = reading(("a", chunk(0, 10))).positions(most).tolist()
    assert found == [*range(starts[0], starts[0] + 8), *range(starts[1], starts[1] + 2)]


def test_reading_without_a_runner_is_an_error() -> None:
    """A step that was published without what runs the model."""
    with pytest.raises(IntegrityError, match="is to be read again, and nothing runs the model"):
        Rereading(reading(("a", chunk(0, 10))), AttentionMetadata(), ["layer"], None).run()


@pytest.mark.parametrize("is_v2", [False, True])
def test_reading_takes_tokens_of_the_requests_row(is_v2: bool) -> None:
    """Of the request's row, wherever the runner keeps them."""
    ids = np.arange(40, dtype=np.int32).reshape(2, 20)
    rows = {"b": 0, "a": 1}
    batch = SimpleNamespace(req_id_to_index=rows, token_ids_cpu=ids)
    table = SimpleNamespace(gpu=torch.from_numpy(ids))
    states = SimpleNamespace(req_id_to_index=rows, all_token_ids=table)
    runner = SimpleNamespace(input_batch=batch, req_states=states, device=torch.device("cpu"))
    reader = Reader(SimpleNamespace(model_runner=runner, use_v2_model_runner=is_v2))
    found = [reader._tokens(block).tolist() for block in reading(("a", chunk(3, 10))).blocks]
    assert found == [[*range(23, 28)], [*range(28, 30)]]


@pytest.mark.parametrize("most", [1 << 24, HEADS * GROUP * SIZE * 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_reading_attends_to_first_page_and_block(
    dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a block: softmax over the first page, the block, and its own tokens up to each query.

    As many blocks at once as are counted, and at least one.
    """
    attend, numbers = reconstruction._attend, list[int]()

    def counted(query: torch.Tensor, *rest: Any, is_causal: bool) -> Any:
        numbers.append(len(query))
        return attend(query, *rest, is_causal=is_causal)

    monkeypatch.setattr(reconstruction, "MAX_GATHERED", most)
    monkeypatch.setattr(reconstruction, "_attend", counted)
    torch.manual_seed(0)
    scales = (1.0, 1.0) if dtype is torch.float32 else (0.5, 0.25)
    words = 2 * SIZE * dtype.itemsize + 12
    storage = dtype if dtype is torch.float32 else torch.uint8
    content = words // storage.itemsize
    pages = torch.zeros(8, HEADS, PAGE, content, dtype=storage)
    cache = LayerCache.of(pages, SIZE, keeps_scores=True, dtype=dtype, scales=scales)
    query, key, value = (torch.randn(24, n, SIZE) for n in (HEADS * GROUP, HEADS, HEADS))
    prompt = chunk(0, 24)
    kernels = TorchKernels()
    tensors = StepTensors(query, key, value, torch.empty_like(query), 0.3)
    kernels.prefill(cache, [prompt], tensors, Scoring(2))
    found = reading(("a", prompt))
    again = tuple(torch.randn(x.shape) for x in (query, key, value))
    out = torch.full_like(query, torch.nan)
    others = found.attend(cache, *again, 0.3, out)
    # Each part of the first block; the others are alike.
    assert numbers == ([1] * 6 if most < 1 << 24 else [1, 1, 2, 2])
    held = [
        (view[cache.rows(TABLE)].flatten(1, 2)[:, :24].float() * scale).transpose(0, 1)
        for view, scale in zip((cache.key, cache.value), scales, strict=True)
    ]
    for start, stop in ((0, 8), (8, 16), (16, 24)):
        seen = [*range(0 if start == 0 else 4), *range(start, stop)]
        for i in range(start, stop):
            k, v = (
                torch.cat([x[seen], y[start : i + 1]]).repeat_interleave(GROUP, 1)
                for x, y in zip(held, again[1:], strict=True)
            )
            logits = torch.einsum("hd,lhd->hl", again[0][i], k) * 0.3
            probs = logits.softmax(-1)
            torch.testing.assert_close(out[i], torch.einsum("hl,lhd->hd", probs, v))
            torch.testing.assert_close(others[i], logits[:, len(seen) :].logsumexp(-1))
    # What is added counts with the observation window and without it, however much that gave.
    without, rows = cache.score_without_window, cache.rows(TABLE[:5])
    assert without is not None
    cache.score[rows], without[rows] = 0.0, 0.0
    found.score(cache, replace(tensors, query=again[0], sink_logits=others))
    given = without[rows].clone()
    assert (given.flatten(1)[:, :24] > 0).all()
    assert torch.equal(cache.score[rows], given)
    cache.score[rows] = 1e6
    found.score(cache, replace(tensors, query=again[0], sink_logits=others))
    assert torch.equal(without[rows], 2 * given)
    torch.testing.assert_close(cache.score[rows], 1e6 + given)


def test_attention_of_gpus_has_the_shapes_of_a_cpu_s() -> None:
    """Of another function of torch, which pads the sums; no device computes here."""
    query, key, value = (torch.empty(2, n, 18, SIZE, device="meta") for n in (6, 2, 2))
    out, sums = reconstruction._attend(query, key, value, 0.3, is_causal=True)
    assert (out.shape, sums.shape, sums.dtype) == (query.shape, (2, 6, 18), torch.float32)
