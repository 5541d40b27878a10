# SPDX-License-Identifier: Apache-2.0
"""The rehearsal runs all kernels of prompts beforehand, on pages of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, partialmethod
from typing import Any

import pytest
import torch

from vllm_h2o.kernels.batch import PromptChunk, Scoring, StepTensors
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.triton.kernels import TritonKernels
from vllm_h2o.kernels.triton.rehearsal import rehearse
from vllm_h2o.policy.h2o2 import H2O2

pytestmark = pytest.mark.slow

HEADS, GROUP, HEAD_SIZE, BLOCK_SIZE = 2, 3, 64, 16


def counted(ran: Counter[str], name: str, run: Callable[..., None], *args: Any) -> None:
    """Run, and count."""
    ran[name] += 1
    run(*args)


def joined(cache: LayerCache, ran: Counter[str], join: Any = LayerCache.joined) -> LayerCache:
    """The pages of all layers, counted."""
    ran["joined"] += 1
    all_of_them: LayerCache = join(cache)
    return all_of_them


@pytest.mark.parametrize(
    ("dtype", "kinds", "has_sinks", "num_layers"),
    [
        (torch.float32, (False, False, False), False, 1),
        (torch.float32, (True, True, True), True, 1),
        (torch.float8_e4m3fn, (True, False, True), False, 1),
        (torch.float32, (True, False, True), False, 3),
    ],
)
def test_rehearsal_runs_every_prompt_kernel(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    kinds: tuple[bool, bool, bool],
    has_sinks: bool,
    num_layers: int,
) -> None:
    """Each stage of a prompt, for every kind of page, and with attention sinks; where layers share
    slots survivors move in all; and the pool is left alone. A first and a later chunk are attended.
    """
    attended: list[int] = []
    kernels = TritonKernels(torch.device("cpu"), 4, GROUP * HEADS, HEADS, HEAD_SIZE)
    own = kernels.prompt_attention

    def attend(cache: LayerCache, chunks: Sequence[PromptChunk], step: StepTensors) -> torch.Tensor:
        attended.extend(chunk.resident_start for chunk in chunks)
        return own(cache, chunks, step)

    monkeypatch.setattr(kernels, "prompt_attention", attend)
    words = 2 + kinds[1] + kinds[2]
    content = 2 * HEAD_SIZE + 4 * words // dtype.itemsize
    layout = (3, num_layers * HEADS, BLOCK_SIZE, content)
    pool = torch.randn(layout).to(dtype)
    cache = LayerCache.of(pool[:, -HEADS:], HEAD_SIZE, *kinds)
    before = pool.view(torch.uint8).clone()
    ran: Counter[str] = Counter()
    for name in ("prefill", "score_term", "pack_survivors", "copy_survivors"):
        monkeypatch.setattr(kernels, name, partial(counted, ran, name, getattr(kernels, name)))
    monkeypatch.setattr(LayerCache, "joined", partialmethod(joined, ran))
    scoring, terms = Scoring.of(H2O2.ranking), H2O2.ranking.passes
    query, key = torch.zeros(1, GROUP * HEADS, HEAD_SIZE), torch.zeros(1, HEADS, HEAD_SIZE)
    sinks = torch.zeros(GROUP * HEADS) if has_sinks else None
    step = StepTensors(query, key, key, query, 1.0, sinks)
    rehearse(kernels, cache, step, scoring, terms)
    assert attended == ([] if has_sinks else [0, 2])
    once = {"prefill": 2, "score_term": 2, "pack_survivors": 1 + kinds[0]}
    assert ran == once | ({"joined": 1} if num_layers > 1 else {})
    assert torch.equal(pool.view(torch.uint8), before)
    if num_layers > 1:  # which do not go with prefix caching
        return
    rehearse(kernels, cache, step, scoring, terms, shares_pages=True)
    apart = {"score_term": 5, "copy_survivors": 1 + kinds[0]}
    assert ran == {name: 2 * number for name, number in once.items()} | apart
    assert torch.equal(pool.view(torch.uint8), before)
