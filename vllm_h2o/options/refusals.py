# SPDX-License-Identifier: Apache-2.0
"""Refusals of what no policy supports: one table for models, one for engines.

Refusals of two things that do not go together follow from
:mod:`vllm_h2o.options.capabilities`.
"""

from __future__ import annotations

from vllm_h2o.options.capabilities import Setup
from vllm_h2o.options.refusal import Refusal
from vllm_h2o.options.remedies import (
    ANOTHER_MODEL,
    SPECULATIVE,
    TEXT_ALONE,
    Given,
    another_dtype,
    flag,
    flags,
    leave_out,
    other_model,
)
from vllm_h2o.options.traits import (
    CPU_PAGE,
    EXAMPLE,
    FLOAT8,
    FULL_ATTENTION,
    MULTIMODAL,
    NO_CACHE,
    OFFLOADING,
    SLIDING_ATTENTION,
    STATE_SPACE,
    alibi,
    bounds_hits,
    caps_logits,
    connector,
    float8,
    foreign_platform,
    kinds,
    odd_pages,
    old_gpu,
    older_ray,
    sees,
    slides,
    slides_everywhere,
    untried_multimodal,
)

CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", *FLOAT8)
"""Values of ``--kv-cache-dtype`` that a policy supports."""

ONE_GROUP = "the policy works on one group of layers with full attention"
"""Why a model is refused whose layers vLLM divides into more groups."""

WHY_OPTION = {
    "scheduler_cls": "only this scheduler plans which tokens stay",
    "worker_cls": "only this worker passes the scheduler's plan to the kernels",
    "attention_backend": "only the policy's kernels keep scores and evict",
}
"""Options that a policy sets itself: why another value is refused, in ``hooks.prepare``."""

IN_LAYERS = {
    "alibi_slopes": "ALiBi",
    "sliding_window": "a sliding window",
    "logits_soft_cap": "a soft cap of the logits",
    "kv_sharing_target_layer_name": "cross-layer KV sharing",
    "attn_type": "attention other than a decoder's",
}
"""Arguments of an attention layer that the policy's attention refuses."""
WHY_IN_LAYERS = "the policy's attention does not compute it"

NO_CONNECTOR = leave_out("kv_transfer_config", "kv_offloading_size", otherwise=ANOTHER_MODEL)
NO_PREFIX = "it would hand on pages with evicted tokens as if they held all"
DOES_NOT_GENERATE = "it does not generate one token after another"

WINDOW_AT_ONCE = "the queries of the window are computed in one step"


def _more_room(given: Given) -> str:
    """Say how a step has room for the observation window."""
    tokens = "max_num_scheduled_tokens"
    tokens = tokens if tokens in given else "max_num_batched_tokens"
    drafts = f", fewer drafts ({flags(SPECULATIVE, given)})" if given & {*SPECULATIVE} else ""
    return (
        f"give a larger {flag(tokens)}, fewer --max-num-seqs{drafts}, or a smaller "
        "observation_window"
    )


def _draft_by_ngrams(given: Given) -> str:
    """Say how to draft by n-grams, in the form in which drafts were asked for."""
    named = flags(SPECULATIVE, given)
    if not named:
        return "name the model that this checkpoint of a speculator drafts for"
    if "speculative_config" in given:
        return f'give "method": "ngram" in --speculative-config, or leave {named} out'
    model = " without --spec-model" if "spec_model" in given else ""
    return f"give --spec-method ngram{model}, or leave {named} out"


def _fewer_drafts(given: Given) -> str:
    """Say how drafts fit between two evictions."""
    few = "fewer --spec-tokens"
    few = few if "spec_tokens" in given else "fewer num_speculative_tokens in --speculative-config"
    return f"give a larger evict_every, or {few}"


MODEL_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "a pooling model",
        lambda s: s.model.runner_type != "generate",
        DOES_NOT_GENERATE,
        other_model("runner", "convert"),
    ),
    Refusal(
        "a diffusion model",
        lambda s: s.model.is_diffusion,
        DOES_NOT_GENERATE,
        other_model(),
    ),
    Refusal(
        "an encoder-decoder model",
        lambda s: s.model.is_encoder_decoder,
        "cross-attention keeps another cache",
        other_model(),
    ),
    Refusal(
        "multi-head latent attention (MLA)",
        lambda s: s.model.use_mla,
        "its cache holds one latent vector for all heads, not K and V of each",
        other_model(),
    ),
    Refusal(
        "an attention-free (state-space) model",
        lambda s: s.model.is_attention_free,
        "its states are not tokens that can be evicted",
        other_model(),
    ),
    Refusal(
        "attention in both directions within an image",
        lambda s: s.model.is_mm_prefix_lm and sees(s.engine),
        "the kernels do not let a token attend to later ones",
        other_model(otherwise=TEXT_ALONE),
    ),
    Refusal(
        f"a multimodal model other than {', '.join(MULTIMODAL.values())}",
        lambda s: untried_multimodal(s.engine),
        "it is not tested",
        other_model(otherwise=TEXT_ALONE),
    ),
    Refusal(
        "ALiBi or a soft cap of the attention's logits",
        lambda s: alibi(s.engine) or caps_logits(s.engine),
        WHY_IN_LAYERS,
        other_model(),
    ),
    Refusal(
        "a sliding window in every layer",
        lambda s: slides_everywhere(s.engine),
        "the policy evicts from layers with full attention alone",
        other_model(),
    ),
    Refusal(
        "layers with neither full attention, a sliding window nor a state",
        lambda s: bool(
            kinds(s.engine) - {FULL_ATTENTION, SLIDING_ATTENTION, *STATE_SPACE, *NO_CACHE}
        ),
        "vLLM gives chunked-local attention the backend of full attention; others are untested",
        other_model(),
    ),
)
"""Refusals whose ``applies`` reads ``engine.model_config`` alone."""

REFUSALS: tuple[Refusal, ...] = (
    *MODEL_REFUSALS,
    Refusal(
        "another attention backend for full attention",
        lambda s: s.engine.attention_config.backend_per_kind[FULL_ATTENTION].name != "CUSTOM",
        WHY_OPTION["attention_backend"],
        "leave full_attention out of --attention-config.backend_per_kind",
    ),
    Refusal(
        "a KV connector that offloads to host memory",
        lambda s: connector(s.engine) in OFFLOADING,
        "its stores may still read pages that an eviction gives to others",
        NO_CONNECTOR,
    ),
    Refusal(
        "LMCache",
        lambda s: (connector(s.engine) or "").startswith("LMCache"),
        "it loads all tokens that it has or fails, but a prompt's last queries must be computed",
        NO_CONNECTOR,
    ),
    Refusal(
        "a KV connector other than ExampleConnector",
        lambda s: connector(s.engine) not in (None, EXAMPLE),
        NO_PREFIX,
        NO_CONNECTOR,
    ),
    Refusal(
        "ExampleConnector with several workers",
        lambda s: (
            s.engine.kv_transfer_config is not None and s.engine.parallel_config.world_size > 1
        ),
        "workers would overwrite each other's files",
        leave_out(
            *("kv_transfer_config", "tensor_parallel_size", "pipeline_parallel_size"),
            otherwise=ANOTHER_MODEL,
        ),
    ),
    Refusal(
        "ExampleConnector without prefix caching",
        lambda s: (
            s.engine.kv_transfer_config is not None
            and not s.engine.cache_config.enable_prefix_caching
        ),
        "without prefix caching survivors are moved within the prompt's pages",
        leave_out(
            "kv_transfer_config",
            otherwise=ANOTHER_MODEL,
            instead=", or give --enable-prefix-caching",
        ),
    ),
    Refusal(
        "KV cache events with neither prefix caching nor continuation",
        lambda s: (
            not s.engine.cache_config.enable_prefix_caching
            and not s.options.continues
            and bool(events := s.engine.kv_events_config)
            and events.enable_kv_cache_events
        ),
        "no page holds a prefix that a router could send requests to",
        leave_out(
            "kv_events_config",
            otherwise=ANOTHER_MODEL,
            instead=", or use prefix caching or continuation",
        ),
    ),
    Refusal(
        "prefix caching and sliding windows",
        lambda s: (
            s.engine.cache_config.enable_prefix_caching
            and slides(s.engine)
            and not bounds_hits(s.engine)
        ),
        "this vLLM may find a longer prefix than the policy can use, whose windows are gone",
        "leave --enable-prefix-caching out, or use vLLM 0.33",
    ),
    Refusal(
        "layers of several kinds without the hybrid KV cache manager",
        lambda s: (
            s.engine.scheduler_config.disable_hybrid_kv_cache_manager
            and (slides(s.engine) or s.model.is_hybrid)
        ),
        "the policy's pages and vLLM's own would be one group",
        "leave --disable-hybrid-kv-cache-manager out",
    ),
    Refusal(
        f"sliding windows with a block size that is no multiple of {CPU_PAGE}",
        lambda s: slides(s.engine) and odd_pages(s.engine),
        "vLLM's CPU attention computes these layers, and needs such block sizes",
        f"give --block-size {CPU_PAGE}, 64 or 128",
    ),
    Refusal(
        "prompt chunks that may be smaller than the observation window",
        lambda s: 0 < _most_chunk(s) < s.options.num_window_queries,
        WINDOW_AT_ONCE,
        "give a larger --long-prefill-token-threshold or none, or a smaller observation_window",
    ),
    Refusal(
        "steps whose room for a prompt may be smaller than the observation window",
        lambda s: _least_room(s) < s.options.num_window_queries > 0,
        WINDOW_AT_ONCE,
        _more_room,
    ),
    Refusal(
        "speculative decoding other than by n-grams",
        lambda s: bool(spec := s.engine.speculative_config) and spec.method != "ngram",
        "a draft model keeps K and V of every token in the pages of what survives",
        _draft_by_ngrams,
    ),
    Refusal(
        "more drafts than fit between two evictions",
        lambda s: _drafts_too_many(s),
        "drafts fill slots while nothing is evicted, so that evict_every must be at least "
        "num_speculative_tokens + 2",
        _fewer_drafts,
    ),
    Refusal(
        "a KV cache quantised to anything but fp8",
        lambda s: s.engine.cache_config.cache_dtype not in CACHE_DTYPES,
        "the policy's pages hold K and V with one scale for each of a layer",
        another_dtype("auto or fp8"),
    ),
    Refusal(
        "an fp8 KV cache in some layers alone",
        lambda s: float8(s.engine) and bool(s.engine.cache_config.kv_cache_dtype_skip_layers),
        "the policy's layers have pages of one size",
        leave_out("kv_cache_dtype_skip_layers", otherwise=ANOTHER_MODEL),
    ),
    Refusal(
        "an fp8 KV cache on a GPU older than Ada",
        lambda s: float8(s.engine) and old_gpu(s.engine),
        "Triton has no float8 below compute capability 8.9",
        another_dtype("auto"),
    ),
    Refusal(
        "data parallelism of a mixture of experts",
        lambda s: s.engine.parallel_config.data_parallel_size > 1 and s.model.is_moe,
        "its replicas compute layers together, which is not tested",
        leave_out(
            "data_parallel_size",
            otherwise="leave VLLM_DP_SIZE out, and run separate engines behind a load balancer",
            instead=", and run separate engines behind a load balancer",
        ),
    ),
    Refusal(
        "context parallelism",
        lambda s: (
            s.engine.parallel_config.decode_context_parallel_size > 1
            or s.engine.parallel_config.prefill_context_parallel_size > 1
        ),
        "a rank needs every token of a request",
        leave_out(
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
            otherwise=ANOTHER_MODEL,
        ),
    ),
    Refusal(
        "vLLM's older Ray executor",
        lambda s: older_ray(s.engine),
        "it does not pass the scheduler's plan to the workers",
        "leave VLLM_USE_RAY_V2_EXECUTOR_BACKEND out",
    ),
    Refusal(
        "micro-batches",
        lambda s: s.engine.parallel_config.use_ubatching,
        "a rank needs every request of a step",
        leave_out("enable_dbo", "ubatch_size", otherwise=ANOTHER_MODEL),
    ),
    Refusal(
        "a platform other than CPU and CUDA",
        lambda s: foreign_platform(s.engine),
        "the policy has no kernels for it",
        "use a CUDA or a CPU build of vLLM",
    ),
)
"""Refusals of one thing each; pairs follow from capabilities."""


def _least_room(setup: Setup) -> int:
    """Return the tokens of a step that are left for a prompt in the worst case."""
    limits = setup.engine.scheduler_config
    # In the worst case every other sequence takes a token of the step, and its drafts.
    max_tokens: int = limits.max_num_scheduled_tokens or limits.max_num_batched_tokens
    room = max_tokens - (limits.max_num_seqs - 1) * (1 + setup.engine.num_speculative_tokens)
    if any(term.sees_later for term in setup.options.ranking.terms):
        room = max(room, max_tokens // 2)  # their chunks wait until they have that much
    return room


def _most_chunk(setup: Setup) -> int:
    """Return the most tokens of a chunk, whatever room its step has; 0: no limit."""
    return int(setup.engine.scheduler_config.long_prefill_token_threshold)


def _drafts_too_many(setup: Setup) -> bool:
    """Whether a request's drafts do not fit between two evictions."""
    spec, schedule = setup.engine.speculative_config, setup.options.schedule
    if spec is None or not setup.options.policy.evicts:
        return False
    every = setup.engine.cache_config.block_size if schedule.by_page else schedule.every
    return bool(every < spec.num_speculative_tokens + 2)
