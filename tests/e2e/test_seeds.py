# SPDX-License-Identifier: Apache-2.0
"""Sampled requests with a seed whose prompts take several steps, which stock vLLM ends with."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.e2e.harness import CHARACTERS, Probe, engine, preempt_all_once

SETTINGS = {"max_model_len": 512, "block_size": 16, "num_gpu_blocks_override": 200}
WAYS: dict[str, dict[str, Any]] = {
    "at the end": {"budget": "full"},
    "after chunks": {"budget": "full", "eviction": "chunk"},
}


def sampled(llm: LLM) -> list[list[int]]:
    """Tokens of prompts of all lengths at once: seeded, not seeded and greedy ones."""
    prompts = [{"prompt_token_ids": CHARACTERS[n : n + 20 + 60 * n]} for n in range(6)]
    params = [
        SamplingParams(
            temperature=float(n != 4),
            seed=None if n == 5 else n,
            max_tokens=30,
            ignore_eos=True,
            detokenize=False,
        )
        for n in range(6)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs[:5]]


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[int]]:
    """Tokens where every prompt is computed in one step."""
    whole = {"max_num_batched_tokens": 4096, "max_num_seqs": 8}
    with engine(model, "full", {}, **SETTINGS, **whole) as llm:
        return sampled(llm)


@pytest.mark.parametrize("preempts", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_seeded_prompt_in_several_steps_gives_the_tokens_of_one_step(
    way: str,
    preempts: bool,
    model: str,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also beside others, and after a preemption."""
    small = {"max_num_batched_tokens": 64, "max_num_seqs": 8}
    with (
        monkeypatch.context() as patch,
        engine(model, "h2o", WAYS[way], **SETTINGS, **small) as llm,
    ):
        probe = Probe(llm)
        if preempts:
            preempt_all_once(probe, patch, at=20)
        assert sampled(llm) == expected
        assert max(probe.num_scheduled) <= 64
