# SPDX-License-Identifier: Apache-2.0
"""Predicates on VllmConfig for refusals."""

from __future__ import annotations

from inspect import signature
from typing import Any

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
"""Kinds of layers, in the words of model configs and vLLM."""
STATE_SPACE = {"mamba", "mamba2", "conv", "linear_attention", "recurrent", "hybrid"}
"""Kinds of layers that keep one state for all tokens; a hybrid layer keeps K and V, too."""
NO_CACHE = {"mlp", "moe"}
"""Kinds of layers that keep nothing."""
CPU_PAGE = 32
"""vLLM's CPU attention needs block sizes that are multiples of this number of slots."""
FLOAT8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""Values of ``--kv-cache-dtype`` that store K and V in 8 bits."""
EXAMPLE = "ExampleConnector"
"""vLLM's KV connector that keeps prompts in files."""
OFFLOADING = ("OffloadingConnector", "SimpleCPUOffloadConnector")
"""vLLM's KV connectors that keep prompts in host memory."""

MULTIMODAL = {
    "llava": "LLaVA",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_5": "Qwen3.5",
    "internvl": "InternVL",
}
"""Tested models for text and images, by the type in their config."""


def alibi(vllm_config: Any) -> bool:
    """Whether logits are biased by distance."""
    hf = vllm_config.model_config.hf_text_config.to_dict()
    attn = hf.get("attn_config") or {}
    return bool(
        hf.get("alibi")
        or (isinstance(attn, dict) and attn.get("alibi"))
        or hf.get("model_type") == "bloom"
        or hf.get("position_embedding_type") == "alibi"
    )


def caps_logits(vllm_config: Any) -> bool:
    """Whether attention logits have a soft cap."""
    return bool(vllm_config.model_config.hf_text_config.to_dict().get("attn_logit_softcapping"))


def kinds(vllm_config: Any) -> set[str]:
    """Return the kinds of its layers, in the words of the model's config."""
    found = vllm_config.model_config.hf_text_config.to_dict().get("layer_types") or ()
    return {FULL_ATTENTION if kind == "attention" else kind for kind in found}


def slides(vllm_config: Any) -> bool:
    """Whether some layers have a sliding window and others do not."""
    window = vllm_config.model_config.get_sliding_window()
    return window is not None and SLIDING_ATTENTION in kinds(vllm_config)


def slides_everywhere(vllm_config: Any) -> bool:
    """Whether every layer has a sliding window."""
    window = vllm_config.model_config.get_sliding_window()
    return window is not None and kinds(vllm_config) <= {SLIDING_ATTENTION}


def odd_pages(vllm_config: Any) -> bool:
    """Whether vLLM's CPU attention does not support the block size."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu() and bool(vllm_config.cache_config.block_size % CPU_PAGE)


def skips_rotation(vllm_config: Any) -> bool:
    """Whether some layers may skip rotary embeddings, as in SmolLM3."""
    hf = vllm_config.model_config.hf_text_config.to_dict()
    words = ("no_rope", "nope", "use_rope_layers")
    says_so = any(hf[name] for name in hf if any(word in name for word in words))
    return says_so or hf.get("model_type") in ("cohere2", "exaone4", "exaone_moe")


def float8(vllm_config: Any) -> bool:
    """Whether K and V are stored in 8 bits, by option or by the checkpoint."""
    cache_dtype = vllm_config.cache_config.cache_dtype
    # vLLM takes a checkpoint's word only when its layers are made.
    scheme = vars(vllm_config.quant_config or object).get("kv_cache_scheme")
    return cache_dtype in FLOAT8 or (cache_dtype == "auto" and scheme is not None)


def images(vllm_config: Any) -> bool:
    """Whether the model takes images, or has several positions per token (M-RoPE)."""
    return sees(vllm_config) or bool(vllm_config.model_config.uses_mrope)


def sees(vllm_config: Any) -> bool:
    """Whether the model takes images or other inputs than text, and is not told to take text."""
    model, given = vllm_config.model_config, vllm_config.model_config.multimodal_config
    is_told = given is not None and given.language_model_only and not given.enable_mm_embeds
    return bool(model.is_multimodal_model) and not is_told


def stages(vllm_config: Any) -> int:
    """Return the number of pipeline stages."""
    return int(vllm_config.parallel_config.pipeline_parallel_size)


def spans_nodes(vllm_config: Any) -> bool:
    """Whether workers may run on another node than the scheduler, or have a scheduler each."""
    parallel = vllm_config.parallel_config
    backend = parallel.distributed_executor_backend
    return parallel.nnodes > 1 or backend in ("ray", "external_launcher")


def connector(vllm_config: Any) -> str | None:
    """Return the name of the KV connector, or the path of one that is not vLLM's; None: none."""
    transfer = vllm_config.kv_transfer_config
    return transfer and (transfer.kv_connector_module_path or transfer.kv_connector or "unnamed")


def old_gpu(_: Any) -> bool:
    """Whether the GPU has no float8."""
    from vllm.platforms import current_platform

    return current_platform.is_cuda() and not current_platform.has_device_capability(89)


def bounds_hits(_: Any) -> bool:
    """Whether vLLM bounds the length of a cached prefix: 0.33 does, 0.32 does not."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    return "max_cache_hit_length" in signature(KVCacheManager.get_computed_blocks).parameters


def older_ray(vllm_config: Any) -> bool:
    """Whether vLLM 0.32 runs steps by its older Ray executor, which 0.33 no longer has."""
    from vllm import envs

    switch = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
    is_ray = vllm_config.parallel_config.distributed_executor_backend == "ray"
    return is_ray and switch in envs.environment_variables and not getattr(envs, switch)


def untried_multimodal(vllm_config: Any) -> bool:
    """Whether the model takes other inputs than text, and is not one of :data:`MULTIMODAL`."""
    return sees(vllm_config) and vllm_config.model_config.hf_config.model_type not in MULTIMODAL


def page_size(vllm_config: Any) -> int:
    """Return the slots of a page of the policy's, as far as they are known.

    Beside states vLLM enlarges pages when the model is loaded, and ``block_size`` becomes that of
    the group with the shortest blocks.
    """
    cache = vllm_config.cache_config
    return int(cache.effective_attention_block_size or cache.block_size)


def foreign_platform(_: Any) -> bool:
    """Whether the platform is neither CPU nor CUDA."""
    from vllm.platforms import current_platform

    return not (current_platform.is_cpu() or current_platform.is_cuda())
