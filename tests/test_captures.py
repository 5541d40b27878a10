# SPDX-License-Identifier: Apache-2.0
"""Hooks: the sizes of steps that CUDA graphs capture with a policy."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import OPTConfig
from vllm.config import CompilationConfig, SchedulerConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from tests.tiny_models import engine_args, folder
from vllm_h2o.hooks import finish
from vllm_h2o.options.config import KVPolicyConfig


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Llama."""
    return folder(tmp_path_factory.mktemp("models"), "LlamaForCausalLM")


CAPTURED = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
"""vLLM's default sizes."""


def captures(args: EngineArgs, **scheduler: int) -> CompilationConfig:
    """Return the sizes that a finished config captures on a device with CUDA graphs."""
    compilation = CompilationConfig(
        cudagraph_capture_sizes=CAPTURED, max_cudagraph_capture_size=CAPTURED[-1]
    )
    config = args.create_engine_config()
    limits = SchedulerConfig.default_factory(max_model_len=64, **scheduler)
    config.compilation_config, config.scheduler_config = compilation, limits
    finish(config, args, KVPolicyConfig.of(config))
    return compilation


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"max_num_seqs": 1024, "max_num_batched_tokens": 8192}, 1024),
        ({"max_num_seqs": 1001, "max_num_batched_tokens": 8192}, 1001),
        ({"max_num_seqs": 1024, "max_num_batched_tokens": 1024}, 1024),
        ({"max_num_seqs": 500, "max_num_batched_tokens": 8192}, 512),
    ],
    ids=str,
)
def test_steps_of_all_sequences_are_captured(llama: str, limits: dict[str, int], most: int) -> None:
    """By sixteen sequences from vLLM's largest size."""
    found = captures(engine_args(llama, kv_policy="h2o"), **limits)
    sizes = found.cudagraph_capture_sizes
    assert found.max_cudagraph_capture_size == most == sizes[-1]
    assert sizes[: len(CAPTURED)] == CAPTURED
    assert all(0 < after - before <= 16 for before, after in pairwise(sizes))


OPT_30B = {"num_hidden_layers": 48, "num_attention_heads": 56, "hidden_size": 7168}
SEQUENCE = 48 * 56 * (2 * 128 * 2 + 8) * 416
"""Bytes of a fifth of 2,048 tokens, in whole pages of 16: K, V in 16 bits, score and position."""
PAGE = SEQUENCE // 26


@pytest.mark.parametrize(
    ("memory", "asked", "most"),
    [
        (80 * 10**9, {}, 512),
        (1000 * SEQUENCE, {}, 899),  # but for the null page there were 900
        (10**9, {"kv_cache_memory_bytes": 600 * SEQUENCE + PAGE}, 600),
        (400 * SEQUENCE, {"tensor_parallel_size": 2}, 719),
        (600 * SEQUENCE, {"kv_policy_config": {"budget": 0.1}}, 1024),
    ],
    ids=str,
)
def test_no_more_sequences_are_captured_than_fit(
    memory: int, asked: dict[str, Any], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capturing holds a page for each next to the weights: 23 GB for 1,024 of OPT-30B."""
    OPTConfig(**OPT_30B, architectures=["OPTForCausalLM"]).save_pretrained(tmp_path)
    monkeypatch.setattr(
        type(current_platform), "get_device_total_memory", classmethod(lambda *_: memory)
    )
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # else that is the memory
    settings = {"dtype": "float16", "block_size": 16, "gpu_memory_utilization": 0.9, **asked}
    args = engine_args(str(tmp_path), kv_policy="h2o", **settings)
    found = captures(args, max_num_seqs=1024, max_num_batched_tokens=8192)
    assert found.max_cudagraph_capture_size == most == found.cudagraph_capture_sizes[-1]


def test_models_with_windows_are_captured_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence takes less there than the limit counts, which would be none here."""
    monkeypatch.setattr(
        type(current_platform), "get_device_total_memory", classmethod(lambda *_: 10**5)
    )
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    args = engine_args(folder(tmp_path, "Gemma3ForCausalLM"), kv_policy="h2o")
    found = captures(args, max_num_seqs=1024, max_num_batched_tokens=8192)
    assert found.max_cudagraph_capture_size == 1024


@pytest.mark.parametrize(
    "asked",
    [
        {"max_cudagraph_capture_size": 512},
        {"cudagraph_capture_sizes": CAPTURED},
        {"compilation_config": {"max_cudagraph_capture_size": 512}},
        {"compilation_config": {"cudagraph_capture_sizes": CAPTURED}},
        {"compilation_config": {"compile_sizes": [8]}},
        {
            "kv_policy_config": {"budget": 64, "evict_every": 4},
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
        },
    ],
    ids=lambda asked: " ".join(asked),
)
def test_captures_of_a_user_stay(llama: str, asked: dict[str, Any]) -> None:
    """In every form; and with drafts, where a step has several tokens per sequence."""
    args = engine_args(llama, kv_policy="h2o", **asked)
    found = captures(args, max_num_seqs=1024, max_num_batched_tokens=8192)
    assert found.cudagraph_capture_sizes == CAPTURED
