# SPDX-License-Identifier: Apache-2.0
"""Prompts that share beginnings, and what an engine finds of them in a cache."""

from __future__ import annotations

from typing import Any

from vllm import LLM, SamplingParams

from tests.e2e.harness import CHARACTERS, token_ids

WINDOW = {"observation_window": 12}
SETTINGS: dict[str, Any] = {"max_model_len": 256, "block_size": 16, "max_num_batched_tokens": 90}


def family() -> list[list[int]]:
    """Prompts that share all, some or nothing of their beginnings, on and off page boundaries."""
    shared = CHARACTERS[:150]
    own = [CHARACTERS[200 + 20 * n : 220 + 20 * n] for n in range(4)]
    return [
        shared, shared, shared[:96] + own[0], shared[:96] + own[1], shared[:100] + own[2],
        shared[:16], shared[:15], shared[:97], own[3] * 9, shared + own[3] * 3,
    ]  # fmt: skip


def run(llm: LLM, prompts: list[list[int]], budgets: list[Any]) -> tuple[list[list[int]], int]:
    """Tokens of each request, and how many of all prompts were found in the cache."""
    params = [
        SamplingParams(
            temperature=0, max_tokens=30, ignore_eos=True, detokenize=False, seed=n,
            extra_args={} if budget is None else {"kv_budget": budget},
        )
        for n, budget in enumerate(budgets)
    ]  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return token_ids(outputs), sum(output.num_cached_tokens for output in outputs)
