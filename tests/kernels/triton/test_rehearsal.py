"""What prompts will need is run before, on pages of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from vllm_h2o.kernels.batch import (
    LARGEST_SECOND_PASS,
    WINDOW_PASS,
    WINDOW_REACH,
    Scoring,
    StepTensors,
)
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.triton.kernels import TritonKernels
from vllm_h2o.kernels.triton.rehearsal import rehearse

HEADS, GROUP, HEAD_SIZE, BLOCK_SIZE = 2, 3, 64, 16


def counted(ran: Counter[str], name: str, run: Callable[..., None], *args: Any) -> None:
    """Run, and count."""
    ran[name] += 1
    run(*args)


@pytest.mark.parametrize(
    ("dtype", "kinds", "has_both"),
    [
        (torch.float32, (False, False, False), False),
        (torch.float32, (True, True, True), True),
        (torch.float8_e4m3fn, (True, False, True), False),
    ],
)
def test_everything_runs(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    kinds: tuple[bool, bool, bool],
    has_both: bool,
) -> None:
    """Each stage of a prompt, for every kind of page, and with initial scores and attention sinks;
    and the pool is left alone.
    """
    kernels = TritonKernels(torch.device("cpu"), 4, GROUP * HEADS, HEADS, HEAD_SIZE)
    words = 2 + kinds[1] + kinds[2]
    content = 2 * HEAD_SIZE + 4 * words // dtype.itemsize
    layout = (3, HEADS, BLOCK_SIZE, content)
    pool = torch.randn(layout).to(dtype)
    cache = LayerCache.of(pool, HEAD_SIZE, *kinds)
    before = pool.view(torch.uint8).clone()
    ran: Counter[str] = Counter()
    for name in ("prefill", "score_pass", "pack_survivors", "copy_survivors"):
        monkeypatch.setattr(kernels, name, partial(counted, ran, name, getattr(kernels, name)))
    scoring = Scoring(power=2, passes=(LARGEST_SECOND_PASS, WINDOW_PASS), reach=WINDOW_REACH)
    query, key = torch.zeros(1, GROUP * HEADS, HEAD_SIZE), torch.zeros(1, HEADS, HEAD_SIZE)
    scores, sinks = (
        (torch.zeros(1, HEADS), torch.zeros(GROUP * HEADS)) if has_both else (None, None)
    )
    step = StepTensors(query, key, key, query, scores, 1.0, sinks)
    rehearse(kernels, cache, step, scoring)
    once = {"prefill": 1, "score_pass": 2, "pack_survivors": 2 + kinds[0]}
    assert ran == once
    rehearse(kernels, cache, step, scoring, shares_pages=True)
    copied = {"prefill": 3, "copy_survivors": 1 + kinds[0]}
    assert ran == {name: 2 * number for name, number in once.items()} | copied
    assert torch.equal(pool.view(torch.uint8), before)
