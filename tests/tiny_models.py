# SPDX-License-Identifier: Apache-2.0
"""Folders with the config of a tiny model, enough for vLLM to make an engine's config of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry

_LLAMA_LIKE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER_DECODER = {
    "vocab_size": 64,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    **_TOKENS,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(**_LLAMA_LIKE),
    "OPTForCausalLM": lambda: transformers.OPTConfig(
        vocab_size=64,
        hidden_size=64,
        ffn_dim=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        word_embed_proj_dim=64,
    ),
    "DeepseekV2ForCausalLM": lambda: transformers.DeepseekV2Config(**_LLAMA_LIKE, **LATENT),
    "WhisperForConditionalGeneration": lambda: transformers.WhisperConfig(
        decoder_start_token_id=1, begin_suppress_tokens=None, **_ENCODER_DECODER
    ),
    "BloomForCausalLM": lambda: transformers.BloomConfig(
        vocab_size=64, hidden_size=64, n_layer=1, n_head=2
    ),
    "FalconForCausalLM": lambda: transformers.FalconConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, alibi=True
    ),
    "MixtralForCausalLM": lambda: transformers.MixtralConfig(**_LLAMA_LIKE, num_local_experts=2),
    "MistralForCausalLM": lambda: transformers.MistralConfig(**_LLAMA_LIKE, sliding_window=16),
    "Gemma2ForCausalLM": lambda: transformers.Gemma2Config(
        **{**_LLAMA_LIKE, "num_hidden_layers": 2}, head_dim=32, sliding_window=16
    ),
    "Gemma3ForCausalLM": lambda: transformers.Gemma3TextConfig(
        **{**_LLAMA_LIKE, "num_hidden_layers": 6}, head_dim=32, sliding_window=16
    ),
    "Qwen2ForCausalLM": lambda: transformers.Qwen2Config(
        **{**_LLAMA_LIKE, "num_hidden_layers": 2},
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=1,
    ),
    "GptOssForCausalLM": lambda: transformers.GptOssConfig(
        **{**_LLAMA_LIKE, "num_hidden_layers": 2}, head_dim=32, num_local_experts=2
    ),
    "Llama4ForCausalLM": lambda: transformers.Llama4TextConfig(
        **{**_LLAMA_LIKE, "num_hidden_layers": 4}, head_dim=32, num_local_experts=2
    ),
    "PaliGemmaForConditionalGeneration": lambda: transformers.PaliGemmaConfig(
        text_config=transformers.GemmaConfig(**_LLAMA_LIKE, head_dim=32),
        vision_config=transformers.SiglipVisionConfig(**_VISION, image_size=32, patch_size=16),
        projection_dim=64,
    ),
    "Qwen2AudioForConditionalGeneration": lambda: transformers.Qwen2AudioConfig(
        text_config=transformers.Qwen2Config(**_LLAMA_LIKE)
    ),
    "MambaForCausalLM": lambda: transformers.MambaConfig(
        vocab_size=64, hidden_size=64, state_size=4, num_hidden_layers=1
    ),
}


def two_layer_opt(max_len: int, num_neurons: int) -> transformers.OPTConfig:
    """Two layers with four heads of 32, of a head size that the CPU kernels take."""
    return transformers.OPTConfig(
        vocab_size=256,
        hidden_size=128,
        ffn_dim=num_neurons,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=max_len,
        word_embed_proj_dim=128,
    )


def folder(parent: Path, architecture: str) -> str:
    """The folder of a tiny model of this architecture, made at first use.

    vLLM looks into each unknown architecture in a process of its own, for seven seconds; a class
    that is registered from here is looked into at once.
    """
    path = parent / architecture
    if not path.exists():
        config = CONFIGS[architecture]()
        config.architectures = [architecture]
        config.save_pretrained(path)
        cls = ModelRegistry.models[architecture].load_model_cls()
        ModelRegistry.register_model(architecture, cls)
    return str(path)


def engine_args(model: str, **options: Any) -> EngineArgs:
    """Engine arguments that need neither weights nor a tokenizer."""
    return EngineArgs(
        model=model, skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, **options
    )


def engine_config(model: str, **options: Any) -> VllmConfig:
    """vLLM's finished config."""
    return engine_args(model, **options).create_engine_config()
