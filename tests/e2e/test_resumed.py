# SPDX-License-Identifier: Apache-2.0
"""Preempted requests that are packed after each chunk when they are computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.e2e.harness import (
    CHARACTERS,
    Probe,
    engine,
    preempt_all_once,
    shrink_terms,
    tiny_llama,
)
from tests.e2e.oracle import Oracle

BUDGET = 48


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kernels": "torch", "num_sink_tokens": 3, "score": "mean"},
        {"evict_every": "page", "recent_ratio": 0.1, "budget": 64},
        {"evict_every": 5, "eviction": "pressure"},
        {"eviction": "chunk"},
        {"merge": 0.2},
        {"policy": "h2o2", "observation_window": 12},
        {"policy": "h2o2", "observation_window": 12, "split": "heads"},
        {"policy": "h2o2", "observation_window": 7, "split": "layers", "kernels": "torch"},
        {"policy": "h2o2", "observation_window": 7, "score": "reconstruction"},
        {"policy": "snapkv", "observation_window": 20},
        {"policy": "snapkv", "observation_window": 20, "enable_prefix_caching": True},
        {"policy": "streaming", "enable_prefix_caching": True},
    ],
    ids=lambda options: " ".join(map(str, options.values())) or "h2o",
)
def test_resumed_request_without_room_keeps_what_the_reference_keeps(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside one request with a full budget, which keeps its pages; all are preempted once."""
    shrink_terms(monkeypatch, block=48, lifetime=9)
    model, options = tiny_llama(tmp_path, 6, 2), {"budget": BUDGET, **options}
    policy = options.pop("policy", "h2o")
    settings = {"max_model_len": 256, "block_size": 16, "num_gpu_blocks_override": 27}
    settings |= {"max_num_batched_tokens": 64, "max_num_seqs": 8}
    settings |= {k: options.pop(k) for k in ("enable_prefix_caching",) if k in options}
    prompts = [{"prompt_token_ids": CHARACTERS[n : n + 15 + 9 * n]} for n in range(8)]
    plain = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(**plain, max_tokens=90) for _ in prompts]
    params[0] = SamplingParams(**plain, max_tokens=230, extra_args={"kv_budget": "full"})
    with monkeypatch.context() as patch, engine(model, policy, options, **settings) as llm:
        probe = Probe(llm)
        preempt_all_once(probe, patch, at=70)
        oracle = Oracle(probe.scheduler).install(patch)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert probe.num_free == probe.num_total
    assert [len(o.outputs[0].token_ids) for o in outputs] == [230] + [90] * 7
    assert oracle.num_resumed > 0
    assert oracle.num_ties <= max(oracle.num_victims / 1000, 1)
    assert oracle.max_error < 1e-4
