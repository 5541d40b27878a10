# SPDX-License-Identifier: Apache-2.0
"""Refusals of what no policy supports: one table for models, one for engines.

Refusals of two things that do not go together follow from
:mod:`vllm_h2o.options.capabilities`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_h2o.errors import UnsupportedError
from vllm_h2o.options.capabilities import Setup
from vllm_h2o.options.traits import (
    CPU_PAGE,
    FLOAT8,
    FULL_ATTENTION,
    MULTIMODAL,
    SLIDING_ATTENTION,
    alibi,
    bounds_hits,
    caps_logits,
    float8,
    foreign_platform,
    kinds,
    odd_pages,
    old_gpu,
    slides,
    slides_everywhere,
    untried_multimodal,
)


@dataclass(frozen=True)
class Refusal:
    """One thing that no policy supports.

    Args:
        what: the thing as the user knows it, after "the engine has".
        applies: whether a setup has it.
        why: the reason.
        remedy: what to do.

    """

    what: str
    applies: Callable[[Setup], bool]
    why: str
    remedy: str


def refuse(refusals: Iterable[Refusal], setup: Setup, asked: str, subject: str) -> None:
    """Stop at the first refusal that applies.

    Args:
        refusals: in their order.
        setup: the policy and the engine.
        asked: what the user asked for.
        subject: what has the refused thing, with a verb: "the engine has".

    Raises:
        UnsupportedError: with the refusal's reason and remedy.

    """
    for refusal in refusals:
        if refusal.applies(setup):
            found = f"{subject} {refusal.what}"
            raise UnsupportedError(asked, found, refusal.why, refusal.remedy)


CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", *FLOAT8)
"""Values of ``--kv-cache-dtype`` that a policy supports."""

ANOTHER_MODEL = "run this model without --kv-policy"

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

MODEL_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "a pooling or a diffusion model",
        lambda s: s.model.runner_type != "generate" or s.model.is_diffusion,
        "it does not generate one token after another",
        ANOTHER_MODEL,
    ),
    Refusal(
        "an encoder-decoder model",
        lambda s: s.model.is_encoder_decoder,
        "cross-attention keeps another cache",
        ANOTHER_MODEL,
    ),
    Refusal(
        "multi-head latent attention (MLA)",
        lambda s: s.model.use_mla,
        "its cache holds one latent vector for all heads, not K and V of each",
        ANOTHER_MODEL,
    ),
    Refusal(
        "an attention-free or hybrid (state-space) model",
        lambda s: s.model.is_attention_free or s.model.is_hybrid,
        "its states are not tokens that can be evicted",
        ANOTHER_MODEL,
    ),
    Refusal(
        "attention in both directions within an image",
        lambda s: s.model.is_mm_prefix_lm,
        "the kernels do not let a token attend to later ones",
        ANOTHER_MODEL,
    ),
    Refusal(
        f"a multimodal model other than {' and '.join(MULTIMODAL.values())}",
        lambda s: untried_multimodal(s.engine),
        "it is not tested",
        ANOTHER_MODEL,
    ),
    Refusal(
        "ALiBi or a soft cap of the attention's logits",
        lambda s: alibi(s.engine) or caps_logits(s.engine),
        WHY_IN_LAYERS,
        ANOTHER_MODEL,
    ),
    Refusal(
        "a sliding window in every layer",
        lambda s: slides_everywhere(s.engine),
        "the policy evicts from layers with full attention alone",
        ANOTHER_MODEL,
    ),
    Refusal(
        "layers with neither full attention nor a sliding window",
        lambda s: bool(kinds(s.engine) - {FULL_ATTENTION, SLIDING_ATTENTION}),
        "vLLM gives chunked-local attention the backend of full attention, and others keep states",
        ANOTHER_MODEL,
    ),
)
"""Refusals whose ``applies`` reads ``engine.model_config`` alone."""

REFUSALS: tuple[Refusal, ...] = (
    *MODEL_REFUSALS,
    Refusal(
        "another attention backend for full attention",
        lambda s: s.engine.attention_config.backend_per_kind[FULL_ATTENTION].name != "CUSTOM",
        WHY_OPTION["attention_backend"],
        "leave full_attention out of attention_config.backend_per_kind",
    ),
    Refusal(
        "a KV connector or KV cache events",
        lambda s: (
            s.engine.kv_transfer_config is not None
            or (bool(events := s.engine.kv_events_config) and events.enable_kv_cache_events)
        ),
        "pages with evicted tokens hold no prefix that another engine could use",
        "leave --kv-transfer-config, --kv-offloading-size and --kv-events-config out",
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
        "sliding windows without the hybrid KV cache manager",
        lambda s: s.engine.scheduler_config.disable_hybrid_kv_cache_manager and slides(s.engine),
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
        lambda s: _cuts_windows(s),
        "the queries of the window are computed in one step",
        "give a larger --max-num-batched-tokens, fewer --max-num-seqs, a larger or no "
        "--long-prefill-token-threshold, or a smaller observation_window",
    ),
    Refusal(
        "speculative decoding other than by n-grams",
        lambda s: bool(spec := s.engine.speculative_config) and spec.method != "ngram",
        "a draft model keeps K and V of every token in the pages of what survives",
        'use --speculative-config \'{"method": "ngram", ...}\', or leave it out',
    ),
    Refusal(
        "more drafts than fit between two evictions",
        lambda s: _drafts_too_many(s),
        "drafts fill slots while nothing is evicted, so that evict_every must be at least "
        "num_speculative_tokens + 2",
        "give a larger evict_every, or fewer num_speculative_tokens",
    ),
    Refusal(
        "a KV cache quantised to anything but fp8, or in some layers alone",
        lambda s: (
            s.engine.cache_config.cache_dtype not in CACHE_DTYPES
            or (float8(s.engine) and bool(s.engine.cache_config.kv_cache_dtype_skip_layers))
        ),
        "the policy's layers have pages of one size, with one scale for K and V of a layer",
        "use --kv-cache-dtype auto, or fp8 without --kv-cache-dtype-skip-layers",
    ),
    Refusal(
        "an fp8 KV cache on a GPU older than Ada",
        lambda s: float8(s.engine) and old_gpu(s.engine),
        "Triton has no float8 below compute capability 8.9",
        "use --kv-cache-dtype auto",
    ),
    Refusal(
        "data parallelism of a mixture of experts",
        lambda s: s.engine.parallel_config.data_parallel_size > 1 and s.model.is_moe,
        "its replicas compute layers together, which is not tested",
        "run separate engines behind a load balancer",
    ),
    Refusal(
        "context parallelism or micro-batches",
        lambda s: (
            s.engine.parallel_config.decode_context_parallel_size > 1
            or s.engine.parallel_config.prefill_context_parallel_size > 1
            or s.engine.parallel_config.use_ubatching
        ),
        "a rank needs every token of a request, and every request of a step",
        "leave the context-parallel sizes at 1, and --enable-dbo and --ubatch-size out",
    ),
    Refusal(
        "a platform other than CPU and CUDA",
        lambda s: foreign_platform(s.engine),
        "the policy has no kernels for it",
        "use a CUDA or a CPU build of vLLM",
    ),
)
"""Refusals of one thing each; pairs follow from capabilities."""


def _cuts_windows(setup: Setup) -> bool:
    """Whether a step may end within an observation window."""
    window, limits = setup.options.num_window_queries, setup.engine.scheduler_config
    # In the worst case every other sequence takes a token of the step, and its drafts.
    max_tokens = limits.max_num_scheduled_tokens or limits.max_num_batched_tokens
    room = max_tokens - (limits.max_num_seqs - 1) * (1 + setup.engine.num_speculative_tokens)
    if any(term.sees_later for term in setup.options.ranking.terms):
        room = max(room, max_tokens // 2)  # their chunks wait until they have that much
    longest = limits.long_prefill_token_threshold or room
    return window > 0 and bool(min(room, longest) < window)


def _drafts_too_many(setup: Setup) -> bool:
    """Whether a request's drafts do not fit between two evictions."""
    spec, schedule = setup.engine.speculative_config, setup.options.schedule
    if spec is None or not setup.options.policy.evicts:
        return False
    every = setup.engine.cache_config.block_size if schedule.by_page else schedule.every
    return bool(every < spec.num_speculative_tokens + 2)
