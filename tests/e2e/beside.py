# SPDX-License-Identifier: Apache-2.0
"""What is tested of models whose other layers keep windows or states beside the policy's pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, RequestOutput

from benchmarks.throughput.models import write_random
from tests.e2e.harness import CHARACTERS, Probe, engine, generate
from tests.e2e.oracle import Oracle
from tests.e2e.zoo import granite4, lfm2
from vllm_h2o.worker.attention import HeavyHitterImpl

PROMPTS = [CHARACTERS[n : n + n] for n in (5, 31, 33, 90, 150, 200)]
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 16}


def tiny_granite4(folder: Path) -> str:
    """Three layers with states, and one with attention that knows no positions."""
    config = granite4("nope", num_local_experts=0)
    config.architectures = ["GraniteMoeHybridForCausalLM"]
    return write_random(config, folder)


def tiny_lfm2(folder: Path) -> str:
    """Three layers with short convolutions, and one with attention and rotary embeddings."""
    config = lfm2()
    config.architectures = ["Lfm2ForCausalLM"]
    return write_random(config, folder)


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
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    for layer in worker.model_runner.compilation_config.static_forward_context.values():
        if isinstance(getattr(layer, "impl", None), HeavyHitterImpl):
            layer.kv_cache.fill_(value)
