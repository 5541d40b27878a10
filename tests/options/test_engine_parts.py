# SPDX-License-Identifier: Apache-2.0
"""Parts of real engine configs: each is seen, and refused with what it breaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from vllm.config import ModelConfig

from tests.tiny_models import CONFIGS, engine_config, folder
from vllm_h2o.errors import UnsupportedError
from vllm_h2o.options import traits
from vllm_h2o.options.config import KVPolicyConfig

LLAMA, GEMMA = "LlamaForCausalLM", "Gemma3ForCausalLM"
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
ROLLS: dict[str, Any] = {"positions": "rolling", "eviction": "chunk", "budget": 64}
READS_AGAIN = {"name": "h2o2", "score": "reconstruction", "split": "none"}
PARTS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    # part of the engine, architecture, vLLM's options, the policy's
    ("prefix caching", LLAMA, {"enable_prefix_caching": True}, {}),
    ("speculative decoding", LLAMA, {"speculative_config": NGRAM}, {"eviction": "pressure"}),
    ("a sliding-window model", GEMMA, {"block_size": 32}, {"continuation": True}),
    ("pipeline parallelism", LLAMA, {"pipeline_parallel_size": 2}, READS_AGAIN),
    ("LoRA", LLAMA, {"enable_lora": True}, READS_AGAIN),
    ("prompt embeddings", LLAMA, {"enable_prompt_embeds": True}, READS_AGAIN),
    ("an fp8 KV cache", LLAMA, {"kv_cache_dtype": "fp8_e5m2"}, {"merge": 0.9}),
    ("an fp8 KV cache", LLAMA, {"kv_cache_dtype": "fp8"}, ROLLS),
    ("a model that skips rotary embeddings", "SmolLM3ForCausalLM", {}, ROLLS),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny models."""
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(("part", "architecture", "settings", "options"), PARTS)
def test_part_of_engine_is_seen(
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    architecture: str,
    settings: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """vLLM takes it, the policy goes with other engines, and the two are refused together."""
    smollm3 = transformers.SmolLM3Config(
        **{**CONFIGS[LLAMA]().to_dict(), "model_type": "smollm3"}, no_rope_layers=[0]
    )
    monkeypatch.setitem(CONFIGS, "SmolLM3ForCausalLM", lambda: smollm3)
    options = {"name": "h2o", "evict_every": 4 if part == "speculative decoding" else 1} | options
    limits = {"max_num_batched_tokens": 128, "max_num_seqs": 4}
    asked = {"additional_config": {"kv_policy": options}}
    engine_config(folder(models, architecture), **limits, **settings)
    engine_config(folder(models, LLAMA), **limits, **asked)
    with pytest.raises(UnsupportedError) as caught:
        engine_config(folder(models, architecture), **limits, **asked, **settings)
    error = caught.value
    assert part in error.asked.split(" with ")
    assert f"{part} " in f"{error.found} {error.why} "


@pytest.mark.parametrize("trait", ["is_multimodal_model", "uses_mrope"])
def test_images_and_mrope_are_seen(
    models: Path, monkeypatch: pytest.MonkeyPatch, trait: str
) -> None:
    """vLLM says it of a model whose text is a Llama's."""
    asked = {"kv_policy": "h2o", "kv_policy_config": ROLLS, "max_num_batched_tokens": 128}
    engine_config(folder(models, LLAMA), **asked)
    monkeypatch.setattr(ModelConfig, trait, property(lambda _: True))
    monkeypatch.setitem(traits.MULTIMODAL, "llama", "Llama")
    with pytest.raises(UnsupportedError, match="an image or M-RoPE model"):
        engine_config(folder(models, LLAMA), **asked)


def test_fp8_of_a_checkpoint_is_seen(tmp_path: Path) -> None:
    """It counts where the user asks for no other dtype, although vLLM reads it later."""
    model = Path(folder(tmp_path, LLAMA))
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    }
    (model / "config.json").write_text(json.dumps(config))
    asked: dict[str, Any] = {"kv_policy": "h2o", "kv_policy_config": {"merge": 0.9}}
    with pytest.raises(UnsupportedError, match="an fp8 KV cache with merge=0.9") as caught:
        engine_config(str(model), **asked)
    assert "use --kv-cache-dtype bfloat16, or" in caught.value.remedy
    engine_config(str(model), **asked, kv_cache_dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_default_merge_is_carried_as_off_where_the_engine_rules_it_out(
    models: Path, dtype: str
) -> None:
    """Every process reads one number; an engine without fp8 carries the user's own options."""
    asked: dict[str, Any] = {"kv_policy": "h2o2", "kv_cache_dtype": dtype}
    made = engine_config(folder(models, LLAMA), **asked)
    assert made.additional_config["kv_policy"]["merge"] == (0.0 if dtype == "fp8" else None)
    assert KVPolicyConfig.required(made).merges is (dtype == "auto")


@pytest.mark.parametrize("shares", [False, True])
def test_default_score_is_carried_as_another_where_the_engine_rules_it_out(
    models: Path, shares: bool
) -> None:
    """Prefix caching leaves the last queries to compute; a score that is asked for is refused."""
    limits = {"max_num_batched_tokens": 128, "max_num_seqs": 4, "enable_prefix_caching": shares}
    model = folder(models, LLAMA)
    made = engine_config(model, kv_policy="h2o2", **limits)
    assert made.additional_config["kv_policy"]["score"] == ("window" if shares else None)
    assert {term.queries for term in KVPolicyConfig.required(made).ranking.terms} == (
        {"window"} if shares else {"all", "rotated", "window"}
    )
    asked = {"kv_policy": "h2o2", "kv_policy_config": {"score": "combined"}}
    if not shares:
        engine_config(model, **asked, **limits)
        return
    with pytest.raises(UnsupportedError, match="score=combined with prefix caching"):
        engine_config(model, **asked, **limits)


@pytest.mark.parametrize("policy", ["streaming", "snapkv", "h2o2", "local", "full"])
def test_prefix_caching_is_taken(models: Path, policy: str) -> None:
    """These policies need no query of a cached prefix; under pressure they need its pages."""
    asked: dict[str, Any] = {"name": policy}
    model, limits = folder(models, LLAMA), {"max_num_batched_tokens": 128, "max_num_seqs": 4}
    settings: dict[str, Any] = {"enable_prefix_caching": True, **limits}
    engine_config(model, **settings, additional_config={"kv_policy": asked})
    if policy != "full":
        pressed = {"kv_policy": {**asked, "eviction": "pressure"}}
        with pytest.raises(UnsupportedError, match="eviction=pressure with prefix caching"):
            engine_config(model, **settings, additional_config=pressed)
