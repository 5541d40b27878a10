"""What a config of vLLM's has that a policy may not go with: questions, no answers."""

from __future__ import annotations

from inspect import signature
from typing import Any

from vllm_h2o.options.config import KVPolicyConfig

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
"""Kinds of layers, as configs of models and vLLM call them."""
CPU_PAGE = 32
"""Of so many slots, and multiples of it, are pages that vLLM's own attention on a CPU takes."""
FLOAT8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""``--kv-cache-dtype`` of K and V in 8 bits."""

MULTIMODAL = {"llava": "LLaVA", "qwen2_5_vl": "Qwen2.5-VL"}
"""Models for text and images that were tried, by the type in their config."""


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


def kinds(vllm_config: Any) -> set[str]:
    """Of its layers, by the model's own words."""
    return set(vllm_config.model_config.hf_text_config.to_dict().get("layer_types") or ())


def slides(vllm_config: Any) -> bool:
    """Whether layers with a sliding window stand next to others."""
    window = vllm_config.model_config.get_sliding_window()
    return window is not None and SLIDING_ATTENTION in kinds(vllm_config)


def slides_everywhere(vllm_config: Any) -> bool:
    """Whether every layer has a sliding window."""
    window = vllm_config.model_config.get_sliding_window()
    return window is not None and kinds(vllm_config) <= {SLIDING_ATTENTION}


def odd_pages(vllm_config: Any) -> bool:
    """Whether vLLM's own attention on a CPU does not take its pages."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu() and bool(vllm_config.cache_config.block_size % CPU_PAGE)


def policy_of(vllm_config: Any) -> KVPolicyConfig:
    """The policy's configuration; the default where there is none."""
    return KVPolicyConfig.of(vllm_config) or KVPolicyConfig()


def cuts_windows(vllm_config: Any) -> bool:
    """Whether an observation window may be cut by the end of a step."""
    config, limits = policy_of(vllm_config), vllm_config.scheduler_config
    shares = vllm_config.cache_config.enable_prefix_caching and config.score_power
    if not shares and not config.ranking.window:
        return False
    # In the worst case every other sequence takes a token of the step, and its drafts.
    max_tokens = limits.max_num_scheduled_tokens or limits.max_num_batched_tokens
    room = max_tokens - (limits.max_num_seqs - 1) * (1 + vllm_config.num_speculative_tokens)
    if config.ranking.second_pass:  # its chunks wait until they have that much
        room = max(room, max_tokens // 2)
    longest = limits.long_prefill_token_threshold or room
    return min(room, longest) < config.observation_window


def drafts_too_many(vllm_config: Any) -> bool:
    """Whether drafts do not fit between two evictions."""
    config, spec = policy_of(vllm_config), vllm_config.speculative_config
    if spec is None or not config.policy.evicts:
        return False
    return bool(config.evict_every < spec.num_speculative_tokens + 2)


def skips_rotation(vllm_config: Any) -> bool:
    """Whether some layers may leave their rotary embedding out, as SmolLM3's do."""
    hf = vllm_config.model_config.hf_text_config.to_dict()
    words = ("no_rope", "nope", "use_rope_layers")
    says_so = any(hf[name] for name in hf if any(word in name for word in words))
    return says_so or hf.get("model_type") in ("cohere2", "exaone4", "exaone_moe")


def float8(vllm_config: Any) -> bool:
    """Whether K and V are stored in 8 bits: as asked, or as the checkpoint has it."""
    cache_dtype = vllm_config.cache_config.cache_dtype
    # vLLM takes a checkpoint's word only when its layers are made.
    scheme = vars(vllm_config.quant_config or object).get("kv_cache_scheme")
    return cache_dtype in FLOAT8 or (cache_dtype == "auto" and scheme is not None)


def reads_again(vllm_config: Any) -> bool:
    """Whether the model reads a prompt a second time."""
    return policy_of(vllm_config).ranking.reads_again


def has_more_than_tokens(vllm_config: Any) -> bool:
    """Whether a model's input is more than tokens with one position each."""
    model = vllm_config.model_config
    return bool(model.is_multimodal_model or model.enable_prompt_embeds or model.uses_mrope)


def stages(vllm_config: Any) -> int:
    """Of pipeline parallelism."""
    return int(vllm_config.parallel_config.pipeline_parallel_size)


def old_gpu(_: Any) -> bool:
    """Whether it is a GPU without float8."""
    from vllm.platforms import current_platform

    return current_platform.is_cuda() and not current_platform.has_device_capability(89)


def bounds_hits(_: Any) -> bool:
    """Whether vLLM looks for a prefix no longer than it is told: 0.33 does, 0.32 does not."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    return "max_cache_hit_length" in signature(KVCacheManager.get_computed_blocks).parameters


def untried_multimodal(vllm_config: Any) -> bool:
    """Whether it takes more than text, and is none of :data:`MULTIMODAL`."""
    model = vllm_config.model_config
    return bool(model.is_multimodal_model) and model.hf_config.model_type not in MULTIMODAL


def foreign_platform(_: Any) -> bool:
    """Whether it is neither a CPU nor a GPU of CUDA's."""
    from vllm.platforms import current_platform

    return not (current_platform.is_cpu() or current_platform.is_cuda())
