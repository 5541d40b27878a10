"""Between vLLM's options and the policy: flags in, seams set, and what does not go refused.

Order in a process that starts an engine::

    flags or arguments --fold_policy--> additional_config["kv_policy"]
    create_engine_config: prepare (before) ... vLLM ... check_config (after)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_h2o.config import ADDITIONAL_CONFIG_KEY, KVPolicyConfig
from vllm_h2o.errors import ConfigError, UnsupportedError
from vllm_h2o.policy import POLICIES

SCHEDULER = "vllm_h2o.scheduler.scheduler.HeavyHitterScheduler"
WORKER = "vllm_h2o.worker.worker.HeavyHitterWorker"
BACKEND = "vllm_h2o.worker.backend.HeavyHitterBackend"


def add_flags(parser: Any) -> Any:
    """Add ``--kv-policy`` and ``--kv-policy-config`` to a parser, in a group of their own."""
    group = parser.add_argument_group(
        title="KVPolicyConfig",
        description="KV-cache eviction (vllm-h2o): which tokens of a sequence stay in the cache.",
    )
    policies = "\n".join(f"- {policy.name}: {policy.summary}" for policy in POLICIES.values())
    group.add_argument(
        "--kv-policy",
        default=None,
        metavar="NAME",
        help=f"Eviction policy. Off by default.\n{policies}",
    )
    group.add_argument(
        "--kv-policy-config",
        default=None,
        metavar="JSON",
        help="Options of the policy as JSON, or one by one: --kv-policy-config.budget 0.2\n"
        "- budget: slots a sequence may hold (int), or a share of max_model_len (float in (0, 1]); "
        "rounded up to whole pages; 0.2 by default\n"
        "- min_budget: fewest slots, whatever the share comes to\n"
        "- recent_ratio: share of the budget that is the recent window; 0.5 by default\n"
        "- num_sink_tokens: first tokens never evicted; 0, for streaming 4\n"
        "- seed: of the random policy",
    )
    return parser


def fold_policy(engine_args: Any, name: Any, options: Any) -> Any:
    """Fold the two arguments into ``engine_args.additional_config``.

    Args:
        engine_args: vLLM's EngineArgs; changed when a policy is named.
        name: ``kv_policy``, or None.
        options: ``kv_policy_config``: a mapping, JSON text, or None.

    Returns:
        ``engine_args``.

    Raises:
        ConfigError: for options that cannot be used, or options without a policy.

    """
    if name is None and options is None:
        return engine_args
    config = KVPolicyConfig.from_options(None if name is None else str(name), options)
    if name is None and "name" not in _as_mapping(options):
        raise ConfigError(
            f"kv_policy_config={options!r}",
            "no kv_policy",
            "options without a policy would be a silent no-op",
            "name one: --kv-policy h2o",
        )
    given = engine_args.additional_config or {}
    if KVPolicyConfig.from_additional_config(given) not in (None, config):
        raise ConfigError(
            f"kv_policy={name!r}",
            f"additional_config holds {given[ADDITIONAL_CONFIG_KEY]!r}",
            "the policy is given twice, differently",
            "give it once",
        )
    engine_args.additional_config = {**given, ADDITIONAL_CONFIG_KEY: config.to_dict()}
    return engine_args


def prepare(engine_args: Any) -> KVPolicyConfig | None:
    """Set vLLM's options for a policy, before vLLM makes its config of them.

    Returns:
        The policy; None when there is none, and nothing was changed.

    Raises:
        UnsupportedError: when the user asks for something else at one of these options.

    """
    config = KVPolicyConfig.from_additional_config(engine_args.additional_config)
    if config is None:
        return None
    from vllm.config import AttentionConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_h2o.plugin import verify_for_policy

    verify_for_policy()
    # Carried in full, so that every process reads the same, whatever form the user gave.
    engine_args.additional_config = {
        **engine_args.additional_config,
        ADDITIONAL_CONFIG_KEY: config.to_dict(),
    }
    custom = AttentionBackendEnum.CUSTOM
    backend = AttentionConfig.validate_backend_before(engine_args.attention_backend)
    backend = backend or engine_args.attention_config.backend
    settings = (
        ("scheduler_cls", engine_args.scheduler_cls, (None, SCHEDULER), SCHEDULER),
        ("worker_cls", engine_args.worker_cls, ("auto", WORKER), WORKER),
        ("attention_backend", backend, (None, custom), custom),
        ("enable_prefix_caching", engine_args.enable_prefix_caching, (None, False), False),
    )
    for option, asked, compatible, value in settings:
        if asked not in compatible:
            raise UnsupportedError(
                f"{option}={asked!s} with --kv-policy {config.name}",
                f"the policy needs {option}={value!s}",
                _WHY_OPTION[option],
                f"leave {option} out, or run without --kv-policy",
            )
        setattr(engine_args, option, value)
    engine_args.attention_config.backend = None  # given once, as attention_backend
    return config


_WHY_OPTION = {
    "scheduler_cls": "only its scheduler says which tokens stay",
    "worker_cls": "only its worker brings the scheduler's plan to the kernels",
    "attention_backend": "only its kernels keep scores and evict",
    "enable_prefix_caching": "survivors are packed into a sequence's own pages: none is shared",
}


@dataclass(frozen=True)
class Refusal:
    """One thing that does not go with a policy.

    Args:
        what: the thing, as the user knows it.
        applies: whether a vLLM config has it.
        why: the reason.
        remedy: what to do.

    """

    what: str
    applies: Callable[[Any], bool]
    why: str
    remedy: str


def _alibi(vllm_config: Any) -> bool:
    hf = vllm_config.model_config.hf_text_config.to_dict()
    attn = hf.get("attn_config") or {}
    return bool(
        hf.get("alibi")
        or (isinstance(attn, dict) and attn.get("alibi"))
        or hf.get("model_type") == "bloom"
        or hf.get("position_embedding_type") == "alibi"
    )


def _windowed(vllm_config: Any) -> bool:
    hf = vllm_config.model_config.hf_text_config.to_dict()
    kinds = set(hf.get("layer_types") or ())
    return vllm_config.model_config.get_sliding_window() is not None or bool(
        kinds - {"full_attention"}
    )


def _not_on_cpu(_: Any) -> bool:
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


_ANOTHER_MODEL = "run this model without --kv-policy"
REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "a pooling model",
        lambda c: c.model_config.runner_type != "generate",
        "nothing is generated, so nothing is evicted",
        _ANOTHER_MODEL,
    ),
    Refusal(
        "an encoder-decoder model",
        lambda c: c.model_config.is_encoder_decoder,
        "cross-attention keeps another cache",
        _ANOTHER_MODEL,
    ),
    Refusal(
        "multi-head latent attention (MLA)",
        lambda c: c.model_config.use_mla,
        "its cache holds one latent vector for all heads, not K and V of each",
        _ANOTHER_MODEL,
    ),
    Refusal(
        "an attention-free or hybrid (state-space) model",
        lambda c: c.model_config.is_attention_free or c.model_config.is_hybrid,
        "its states are not tokens that could be evicted",
        _ANOTHER_MODEL,
    ),
    Refusal(
        "a multimodal model",
        lambda c: c.model_config.is_multimodal_model,
        "it has not been tried",
        _ANOTHER_MODEL,
    ),
    Refusal(
        "a diffusion model",
        lambda c: c.model_config.is_diffusion,
        "it rewrites tokens that were computed",
        _ANOTHER_MODEL,
    ),
    Refusal(
        "ALiBi",
        _alibi,
        "the bias depends on distances that the kernels do not compute",
        _ANOTHER_MODEL,
    ),
    Refusal(
        "sliding-window or other windowed layers",
        _windowed,
        "the policy works where every layer is full attention",
        _ANOTHER_MODEL,
    ),
    Refusal(
        "an attention backend for one kind of cache",
        lambda c: bool(c.attention_config.backend_per_kind),
        "only the policy's own backend keeps scores and evicts",
        "leave attention_config.backend_per_kind out",
    ),
    Refusal(
        "a KV connector",
        lambda c: c.kv_transfer_config is not None,
        "a transferred page has no scores, and an evicted one is no prefix",
        "leave --kv-transfer-config out",
    ),
    Refusal(
        "KV cache events",
        lambda c: c.kv_events_config is not None and c.kv_events_config.enable_kv_cache_events,
        "events describe prefix-cached pages, and there are none",
        "leave --kv-events-config out",
    ),
    Refusal(
        "speculative decoding",
        lambda c: c.speculative_config is not None,
        "a rejected draft would have evicted a token already",
        "leave --speculative-config out",
    ),
    Refusal(
        "a quantised KV cache",
        lambda c: c.cache_config.cache_dtype not in ("auto", "float32", "bfloat16", "float16"),
        "the kernels read K and V as they were computed",
        "use --kv-cache-dtype auto",
    ),
    Refusal(
        "LoRA",
        lambda c: c.lora_config is not None,
        "it has not been tried",
        "leave --enable-lora out",
    ),
    Refusal(
        "tensor, pipeline or data parallelism",
        lambda c: c.parallel_config.world_size_across_dp > 1,
        "it has not been tried",
        "use one worker",
    ),
    Refusal(
        "context parallelism",
        lambda c: (
            c.parallel_config.decode_context_parallel_size > 1
            or c.parallel_config.prefill_context_parallel_size > 1
        ),
        "ranks would hold different tokens of one sequence",
        "leave the context-parallel sizes at 1",
    ),
    Refusal(
        "a platform other than the CPU",
        _not_on_cpu,
        "the kernels for it are not built yet",
        "use a CPU build of vLLM",
    ),
)


def check_config(vllm_config: Any, config: KVPolicyConfig | None) -> Any:
    """Refuse what does not go with the policy.

    Args:
        vllm_config: vLLM's finished config.
        config: the policy; None lets everything pass.

    Returns:
        ``vllm_config``.

    Raises:
        UnsupportedError: for the first of :data:`REFUSALS` that applies.
        ConfigError: when the budget comes to too few slots.

    """
    if config is None:
        return vllm_config
    for refusal in REFUSALS:
        if refusal.applies(vllm_config):
            raise UnsupportedError(
                f"--kv-policy {config.name}",
                f"the engine has {refusal.what}",
                refusal.why,
                refusal.remedy,
            )
    config.resolve(vllm_config.model_config.max_model_len, vllm_config.cache_config.block_size)
    return vllm_config


def _as_mapping(options: Any) -> Any:
    return json.loads(options) if isinstance(options, str) else options
