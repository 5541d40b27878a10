# SPDX-License-Identifier: Apache-2.0
"""Prompts attended by FlashAttention, whose documented meaning plain torch has here."""

from __future__ import annotations

from dataclasses import replace
from weakref import ref

import pytest
import torch

from tests.kernels.caches import BOTH, SHAPE, copied, filled, number, same
from tests.kernels.harness import Shape
from tests.worker.chunks import CASES, chunk_at
from tests.worker.varlen import Varlen
from vllm_h2o.kernels.batch import PromptChunk, Scoring, StepTensors
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.kernels.triton.kernels import TritonKernels
from vllm_h2o.worker.flash import FlashPrompt, runs_of

CPU = torch.device("cpu")


def prefilled(
    chunks: list[PromptChunk], shape: Shape = SHAPE, sink_logits: torch.Tensor | None = None
) -> Varlen:
    """What was asked of it, when outputs and pages were those of the torch kernels."""
    theirs = filled(shape, 20, seed=1)
    number(theirs, chunks)
    ours = copied(theirs, shape)
    query, (key, value) = torch.randn(50, 6, 64), torch.randn(2, 50, 2, 64)
    outs = [torch.full_like(query, 7.0) for _ in range(2)]
    varlen = Varlen()
    flash = TritonKernels(CPU, 8, 6, 2, 64, FlashPrompt(varlen, 3))
    for kernels, cache, out in zip((TorchKernels(), flash), (theirs, ours), outs, strict=True):
        tensors = StepTensors(query, key, value, out, 0.2, sink_logits)
        kernels.prefill(cache, chunks, tensors, Scoring())
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
    same(ours, theirs, 20)
    return varlen


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_flash_prompts_equal_torch(name: str, shape: Shape) -> None:
    """Outputs and scores are those of the torch kernels, however the chunks lie."""
    chunks, num_calls, num_paged = CASES[name]
    varlen = prefilled(chunks, shape)
    assert (varlen.num_calls, varlen.num_paged) == (num_calls, num_paged)


def test_flash_leaves_attention_sinks_to_our_kernel() -> None:
    """What it makes of them has not been tried: our own kernel attends."""
    chunks, _, _ = CASES["one prompt"]
    assert prefilled(chunks, sink_logits=torch.linspace(-1.0, 3.0, 6)).num_calls == 0


def test_sent_once_a_step() -> None:
    """All layers of a step share what was sent for the first; its chunks are not held."""
    flash, chunks = FlashPrompt(Varlen(), 3), [chunk_at(0, 9, 0, 0)]
    cache, query = filled(SHAPE, 20, seed=1), torch.randn(9, 6, 64)
    key = torch.randn(9, 2, 64)
    tensors = StepTensors(query, key, key, torch.empty_like(query), 0.2)
    seen = set()
    for _ in range(2):
        flash(cache, chunks, tensors)
        seen.add(id(flash._runs[0]))
    assert len(seen) == 1
    last = flash._runs[0]
    flash(cache, [replace(chunks[0])], tensors)
    assert flash._runs[0] is not last
    held = ref(chunks.pop())
    assert held() is None


def test_runs_do_not_copy_tables_of_first_chunks() -> None:
    """Keys of a prompt's first chunk are those of the step."""
    (run,) = runs_of([chunk_at(0, 9, 0, 0)], CPU)
    assert run.block_table is None and run.lengths is None and run.bounds.tolist() == [0, 9]
