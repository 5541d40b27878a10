# SPDX-License-Identifier: Apache-2.0
"""What is tested of models whose other layers keep windows or states beside the policy's pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, RequestOutput

from tests.e2e.harness import CHARACTERS, Probe, engine, generate, worker_of
from tests.e2e.oracle import Oracle
from tests.e2e.zoo import granite4, lfm2, write_model, zamba2
from vllm_h2o.worker.attention import HeavyHitterImpl

PROMPTS = [CHARACTERS[n : n + n] for n in (5, 31, 33, 90, 150, 200)]
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 16}


def tiny_granite4(folder: Path) -> str:
    """Three layers with states, and one with attention that knows no positions."""
    return write_model(granite4("nope", num_local_experts=0), folder)


def tiny_lfm2(folder: Path) -> str:
    """Three layers with short convolutions, and one with attention and rotary embeddings."""
    return write_model(lfm2(), folder)


def tiny_zamba2(folder: Path) -> str:
    """Three layers with states, and one with both."""
    return write_model(zamba2(), folder)


KEPT: list[tuple[str, dict[str, Any]]] = [
    ("h2o", {}),
    ("h2o", {"kernels": "torch", "recent_ratio": 0.25, "num_sink_tokens": 3}),
    ("snapkv", {"observation_window": 20}),
    ("h2o", {"eviction": "chunk"}),
    ("h2o", {"evict_every": "page", "recent_ratio": 0.1, "budget": 128}),
    ("h2o2", {"observation_window": 20}),
    ("h2o", {"kv_cache_dtype": "fp8"}),
    ("streaming", {}),
]
"""Policies whose retained sets are compared, with options; one of them is vLLM's."""


def name(value: object) -> str:
    """Name a case of a test by the values of its options, or by its model."""
    if isinstance(value, dict):
        return " ".join(map(str, value.values()))
    return getattr(value, "__name__", str(value)).removeprefix("tiny_")


def follow(
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    policy: str,
    options: dict[str, Any],
    max_tokens: int = 40,
    **settings: Any,
) -> tuple[Oracle, Probe]:
    """Generate, each retained set of each layer with full attention compared after every step."""
    settings = {**SETTINGS, **settings}
    with monkeypatch.context() as patch, engine(model, policy, options, **settings) as llm:
        probe = Probe(llm)
        oracle = Oracle(probe.scheduler).install(patch)
        generate(llm, PROMPTS, max_tokens)
        assert probe.num_free == probe.num_total
    assert oracle.num_victims + oracle.num_together > 0
    assert oracle.num_ties <= max(oracle.num_victims / 1000, 1)
    assert oracle.max_error < 1e-4
    return oracle, probe


def chances(outputs: list[RequestOutput]) -> list[float]:
    """The log-probability of each token."""
    completions = [output.outputs[0] for output in outputs]
    return [
        step[token].logprob
        for completion in completions
        for token, step in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


@torch.inference_mode()
def overwrite(llm: LLM, value: float) -> None:
    """Fill every byte that a page of the policy's may leave."""
    worker = worker_of(llm)
    for layer in worker.model_runner.compilation_config.static_forward_context.values():
        if isinstance(getattr(layer, "impl", None), HeavyHitterImpl):
            layer.kv_cache.fill_(value)
