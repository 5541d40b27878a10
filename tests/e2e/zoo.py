# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of the decoder families that people serve, and what becomes of each.

``python -m tools.zoo`` writes zoo.csv from it, of which docs/compatibility.md is made.

Each model gets weights of chance and runs twice: in stock vLLM, and with a policy. The policy's
engine has a small budget, of which the float64 reference follows every layer, KV head and step;
and some requests with a budget of their own, ``full``, whose tokens must be stock vLLM's.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from vllm import RequestOutput
from vllm.model_executor.models import ModelRegistry

from benchmarks.throughput.models import write_random
from tests.e2e.harness import CHARACTERS, NEAR_TIE, Probe, assert_same_tokens, engine, generate
from tests.e2e.oracle import Oracle
from tests.tiny_models import LATENT
from vllm_h2o.errors import UnsupportedError

RESULTS = Path(__file__).with_name("zoo.csv")
EQUAL = "equal"
"""Stock's tokens at 100 %, and the reference's sets at a small budget."""
LENGTHS = (5, 33, 90)
PROMPTS = [CHARACTERS[7 * n : 8 * n] for n in LENGTHS]
MAX_TOKENS = 20
ROUNDED_TIE = 0.1
"""Nats between two tokens that 16 bits may order either way."""

SMALL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {
    "vocab_size": 256,
    "n_embd": 128,
    "n_inner": 128,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small(kind: type[hf.PretrainedConfig], **options: Any) -> hf.PretrainedConfig:
    """A config with the names that most families share."""
    return kind(**{**SMALL, **options})


def heads(num: int, num_kv: int, size: int) -> Callable[[], hf.PretrainedConfig]:
    """A Llama with so many heads, of this size."""
    options = {"num_attention_heads": num, "num_key_value_heads": num_kv, "head_dim": size}
    return lambda: small(hf.LlamaConfig, hidden_size=16 * num, num_hidden_layers=1, **options)


def sliding(kind: type[hf.PretrainedConfig], **options: Any) -> hf.PretrainedConfig:
    """A config with a window that the longest prompt does not fit into."""
    shape = {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": 32,
        "use_sliding_window": True,
    }
    return small(kind, **{**shape, **options})


def gemma3() -> hf.PretrainedConfig:
    """Five layers slide; with tied embeddings it would say one word again and again."""
    return sliding(hf.Gemma3TextConfig, num_hidden_layers=6, tie_word_embeddings=False)


@dataclass(frozen=True)
class Family:
    """One kind of decoder.

    Args:
        name: as people call it.
        config: of a tiny model.
        dtype: in which it runs; in 16 bits, tokens may differ at wider ties.

    """

    name: str
    config: Callable[[], hf.PretrainedConfig]
    dtype: str = "float32"


FEW = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
ROPE_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
ROPE_YARN |= {"original_max_position_embeddings": 128}
ROPE_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
STATES = {"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 16, "mamba_n_groups": 1}
STATES |= {"mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 32}
MAMBA = ["mamba", "attention", "mamba", "mamba"]


def granite4(position: str, **options: Any) -> hf.PretrainedConfig:
    """A layer with attention, and three with states."""
    own = {"num_hidden_layers": 4, "layer_types": MAMBA, "position_embedding_type": position}
    own["attention_multiplier"] = 32**-0.5  # else softmax leaves most tokens nothing
    return small(
        hf.GraniteMoeHybridConfig, shared_intermediate_size=128, **STATES, **own, **options
    )


def nemotron_h() -> hf.PretrainedConfig:
    """Two layers with states, one with attention, one with neither."""
    states = {"mamba_num_heads": 4, "mamba_head_dim": 64, "ssm_state_size": 16, "n_groups": 1}
    own = {"num_hidden_layers": 4, "hybrid_override_pattern": "M*M-", "mlp_hidden_act": "relu2"}
    return small(hf.NemotronHConfig, head_dim=32, chunk_size=32, **states, **own)


def zamba2() -> hf.PretrainedConfig:
    """One layer with both."""
    kinds = ["mamba", "hybrid", "mamba", "mamba"]
    states = {"n_mamba_heads": 4, "mamba_headdim": 64, "mamba_d_state": 16, "mamba_ngroups": 1}
    own = {"num_hidden_layers": 4, "layers_block_type": kinds, "num_mem_blocks": 1}
    own |= {"num_key_value_heads": 4, "attention_head_dim": 64, "kv_channels": 32}
    return small(hf.Zamba2Config, **states, **own)


def lfm2() -> hf.PretrainedConfig:
    """Three layers with short convolutions, one with attention."""
    kinds = ["conv", "full_attention", "conv", "conv"]
    own = {"num_hidden_layers": 4, "layer_types": kinds, "conv_dim": 128, "conv_dim_out": 128}
    return small(hf.Lfm2Config, block_dim=128, **own)


def lfm2_moe() -> hf.PretrainedConfig:
    """The same with experts in all layers but the first."""
    kinds = ["conv", "full_attention", "conv", "conv"]
    own = {"num_hidden_layers": 4, "layer_types": kinds, "num_dense_layers": 1}
    return small(hf.Lfm2MoeConfig, **own, **MOE)


def qwen3_next() -> hf.PretrainedConfig:
    """Heads with a state of 128 x 128, which vLLM's CPU kernels need, next to large KV heads."""
    kinds = [*["linear_attention"] * 3, "full_attention"]
    states = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    states |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    own = {"num_hidden_layers": 4, "layer_types": kinds, "head_dim": 256, "num_key_value_heads": 4}
    own |= {"shared_expert_intermediate_size": 64, "mlp_only_layers": []}
    return small(hf.Qwen3NextConfig, **states, **own, **MOE)


FAMILIES = (
    Family("Llama", lambda: small(hf.LlamaConfig)),
    Family("Llama, YaRN", lambda: small(hf.LlamaConfig, rope_parameters=ROPE_YARN)),
    Family("Llama, dynamic RoPE", lambda: small(hf.LlamaConfig, rope_parameters=ROPE_DYNAMIC)),
    Family("Llama, bfloat16", lambda: small(hf.LlamaConfig), "bfloat16"),
    Family("Llama, float16", lambda: small(hf.LlamaConfig), "float16"),
    Family("Llama, one KV head of 64 (MQA), one layer", heads(8, 1, 64)),
    Family("Llama, 5 heads of 80, one KV head", heads(5, 1, 80)),
    Family("Llama, 9 heads of 96, 3 KV heads", heads(9, 3, 96)),
    Family("Llama, 4 heads of 112, 2 KV heads", heads(4, 2, 112)),
    Family("Llama, 3 heads of 192, one KV head", heads(3, 1, 192)),
    Family("Llama, 7 heads of 128, 7 KV heads", heads(7, 7, 128)),
    Family("Llama, 2 heads of 256, one KV head", heads(2, 1, 256)),
    Family("Mistral", lambda: small(hf.MistralConfig, sliding_window=None)),
    Family("Mixtral", lambda: small(hf.MixtralConfig, num_local_experts=4)),
    Family("Qwen2", lambda: small(hf.Qwen2Config)),
    Family("Qwen3", lambda: small(hf.Qwen3Config, head_dim=32)),
    Family("Qwen3-MoE", lambda: small(hf.Qwen3MoeConfig, head_dim=32, **MOE)),
    Family("Phi-1, Phi-2", lambda: small(hf.PhiConfig, num_key_value_heads=4)),
    Family("Phi-3", lambda: small(hf.Phi3Config, sliding_window=None)),
    Family(
        "Phi-4-mini",
        lambda: small(
            hf.Phi3Config,
            sliding_window=None,
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
            },
        ),
    ),
    Family("Gemma 1", lambda: small(hf.GemmaConfig, head_dim=32)),
    Family("OLMo", lambda: small(hf.OlmoConfig)),
    Family("OLMo 2", lambda: small(hf.Olmo2Config)),
    Family("Granite", lambda: small(hf.GraniteConfig)),
    Family("Cohere (Command R)", lambda: small(hf.CohereConfig, logit_scale=0.25)),
    Family("GLM 4", lambda: small(hf.Glm4Config, head_dim=32)),
    Family("SmolLM3", lambda: small(hf.SmolLM3Config)),
    Family("StableLM", lambda: small(hf.StableLmConfig)),
    Family("StarCoder 2", lambda: small(hf.Starcoder2Config, sliding_window=None)),
    Family("Nemotron", lambda: small(hf.NemotronConfig, hidden_act="relu2")),
    Family("Seed-OSS", lambda: small(hf.SeedOssConfig, head_dim=32)),
    Family("OLMoE", lambda: small(hf.OlmoeConfig, num_experts=4, num_experts_per_tok=2)),
    Family("Ernie 4.5", lambda: small(hf.Ernie4_5Config, head_dim=32)),
    Family("Apertus", lambda: small(hf.ApertusConfig)),
    Family("GPT-NeoX (Pythia)", lambda: small(hf.GPTNeoXConfig, num_key_value_heads=4)),
    Family("GPT-2", lambda: hf.GPT2Config(**GPT)),
    Family("GPT-J", lambda: hf.GPTJConfig(**GPT, rotary_dim=16)),
    Family("StarCoder (GPT-BigCode)", lambda: hf.GPTBigCodeConfig(**GPT, multi_query=True)),
    Family("OPT", lambda: small(hf.OPTConfig, ffn_dim=128, word_embed_proj_dim=128)),
    Family("Falcon, MQA", lambda: small(hf.FalconConfig, multi_query=True)),
    Family(
        "Falcon, GQA",
        lambda: small(hf.FalconConfig, new_decoder_architecture=True, num_kv_heads=2),
    ),
    Family("Falcon, ALiBi", lambda: small(hf.FalconConfig, alibi=True)),
    Family("BLOOM", lambda: hf.BloomConfig(vocab_size=256, hidden_size=128, n_layer=2, n_head=4)),
    Family("DeepSeek-V2", lambda: small(hf.DeepseekV2Config, num_key_value_heads=4, **LATENT)),
    Family("Mamba", lambda: hf.MambaConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2)),
    Family("Llama 4", lambda: small(hf.Llama4TextConfig, head_dim=32, num_local_experts=2)),
    Family("Mistral, sliding window", lambda: small(hf.MistralConfig, sliding_window=32)),
    Family("Mistral, some layers slide", lambda: sliding(hf.MistralConfig, layer_types=FEW)),
    Family(
        "Qwen3, some layers slide",
        lambda: sliding(hf.Qwen3Config, layer_types=FEW, max_window_layers=4),
    ),
    Family("Gemma 2", lambda: sliding(hf.Gemma2Config)),
    Family("Gemma 2, no soft cap", lambda: sliding(hf.Gemma2Config, attn_logit_softcapping=None)),
    Family("Gemma 3", gemma3),
    Family("Gemma 3, bfloat16", gemma3, "bfloat16"),
    Family("Cohere 2 (Command R7B)", lambda: sliding(hf.Cohere2Config, logit_scale=0.25)),
    Family("OLMo 3", lambda: sliding(hf.Olmo3Config)),
    Family("EXAONE 4", lambda: sliding(hf.Exaone4Config, sliding_window_pattern=4)),
    Family("Granite 4 H", lambda: granite4("nope", num_local_experts=0)),
    Family(
        "Granite 4 H, MoE, RoPE",
        lambda: granite4("rope", num_local_experts=4, num_experts_per_tok=2),
    ),
    Family("Falcon-H1", lambda: small(hf.FalconH1Config, head_dim=32, mamba_d_ssm=256, **STATES)),
    Family("Nemotron-H", nemotron_h),
    Family("Zamba2", zamba2),
    Family("LFM2", lfm2),
    Family("LFM2, MoE", lfm2_moe),
    Family("Qwen3-Next", qwen3_next, "bfloat16"),
    Family("gpt-oss", lambda: sliding(hf.GptOssConfig, num_local_experts=4, num_experts_per_tok=2)),
)


def become(family: Family, folder: Path) -> str:
    """What becomes of a family: equal to stock and to the reference, or refused and why.

    Args:
        family: to run.
        folder: for its model.

    Raises:
        AssertionError: when it runs and is not equal.

    """
    config = family.config()
    _register(architecture_of(config))
    model = write_model(config, folder)
    settings = {"block_size": 32, "max_model_len": 128, "dtype": family.dtype, "max_num_seqs": 8}
    try:
        whole = _with_policy(model, settings)
    except UnsupportedError as error:
        return f"refused: {error.found.removeprefix('the engine has ')}"
    with engine(model, None, **settings) as llm:
        stock = generate(llm, PROMPTS, MAX_TOKENS, logprobs=2)
    exact = family.dtype == "float32"
    excused = assert_same_tokens(stock, whole, near_tie=NEAR_TIE if exact else ROUNDED_TIE)
    assert excused <= (1 if exact else len(PROMPTS))
    return EQUAL


def _with_policy(model: str, settings: dict[str, Any]) -> list[RequestOutput]:
    """What an engine with a small budget answers where a request asks for a full one."""
    with (
        pytest.MonkeyPatch.context() as patch,
        engine(model, "h2o", {"budget": 32}, **settings) as llm,
    ):
        probe = Probe(llm)
        oracle = Oracle(probe.scheduler).install(patch)
        whole = generate(llm, PROMPTS, MAX_TOKENS, extra_args={"kv_budget": "full"})
        assert not oracle.num_victims
        generate(llm, PROMPTS, MAX_TOKENS)
        assert probe.num_free == probe.num_total
        assert oracle.num_victims > 0
        assert oracle.num_ties <= oracle.num_victims / 1000
        return whole


def architecture_of(config: hf.PretrainedConfig) -> str:
    """The name of its class, by which vLLM knows it."""
    return str(hf.AutoModelForCausalLM._model_mapping[type(config)].__name__)


def write_model(config: hf.PretrainedConfig, folder: Path) -> str:
    """Write a model of random weights, of the class that belongs to its config."""
    config.architectures = [architecture_of(config)]
    return write_random(config, folder)


def _register(architecture: str) -> None:
    cls = ModelRegistry.models[architecture].load_model_cls()
    ModelRegistry.register_model(architecture, cls)


def recorded() -> dict[tuple[str, str], str]:
    """(family, minor version of vLLM) -> what became of it."""
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return {(row["family"], row["vllm"]): row["became"] for row in csv.DictReader(file)}


def write(results: dict[tuple[str, str], str]) -> None:
    """Write them, families in their order; those that are no more are left out."""
    names = [family.name for family in FAMILIES]
    rows = sorted(
        (names.index(name), name, minor, became)
        for (name, minor), became in results.items()
        if name in names
    )
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("family", "vllm", "became"))
        writer.writerows(row[1:] for row in rows)
