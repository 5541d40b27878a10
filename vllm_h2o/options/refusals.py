"""What does not go with a policy, why, and what to do instead: one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from vllm_h2o.errors import UnsupportedError
from vllm_h2o.options.traits import (
    CPU_PAGE,
    FLOAT8,
    FULL_ATTENTION,
    MULTIMODAL,
    SLIDING_ATTENTION,
    alibi,
    bounds_hits,
    cuts_windows,
    drafts_too_many,
    float8,
    foreign_platform,
    has_more_than_tokens,
    kinds,
    odd_pages,
    old_gpu,
    policy_of,
    reads_again,
    skips_rotation,
    slides,
    slides_everywhere,
    stages,
    untried_multimodal,
)


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


def refuse(refusals: Iterable[Refusal], vllm_config: Any, asked: str, subject: str) -> None:
    """Stop at the first of some refusals that applies.

    Args:
        refusals: in their order.
        vllm_config: what they look at.
        asked: what was asked for.
        subject: what has the thing that is refused.

    Raises:
        UnsupportedError: with the refusal's reason and remedy.

    """
    for refusal in refusals:
        if refusal.applies(vllm_config):
            found = f"{subject} {refusal.what}"
            raise UnsupportedError(asked, found, refusal.why, refusal.remedy)


CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", *FLOAT8)
"""What ``--kv-cache-dtype`` may be."""

ANOTHER_MODEL = "run this model without --kv-policy"
ANOTHER_MODEL_ROLLS = "run this model with --kv-policy-config.positions original"

READ_ONCE = "use --kv-policy-config.score combined"

ONE_GROUP = "the policy works on one group of layers with full attention"
"""Why a model is refused of whose layers vLLM makes more."""

WHY_OPTION = {
    "scheduler_cls": "only its scheduler says which tokens stay",
    "worker_cls": "only its worker brings the scheduler's plan to the kernels",
    "attention_backend": "only its kernels keep scores and evict",
}
"""Options that a policy sets itself: why another value is refused, in ``hooks.prepare``."""

IN_LAYERS = {
    "alibi_slopes": "ALiBi",
    "sliding_window": "a sliding window",
    "logits_soft_cap": "a soft cap of the logits",
    "kv_sharing_target_layer_name": "cross-layer KV sharing",
    "attn_type": "attention other than a decoder's",
}
"""What an attention layer asks for in its arguments, and the policy's attention refuses."""
WHY_IN_LAYERS = "the policy's attention does not compute it"

MODEL_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "a pooling model",
        lambda c: c.model_config.runner_type != "generate",
        "nothing is generated, so nothing is evicted",
        ANOTHER_MODEL,
    ),
    Refusal(
        "an encoder-decoder model",
        lambda c: c.model_config.is_encoder_decoder,
        "cross-attention keeps another cache",
        ANOTHER_MODEL,
    ),
    Refusal(
        "multi-head latent attention (MLA)",
        lambda c: c.model_config.use_mla,
        "its cache holds one latent vector for all heads, not K and V of each",
        ANOTHER_MODEL,
    ),
    Refusal(
        "an attention-free or hybrid (state-space) model",
        lambda c: c.model_config.is_attention_free or c.model_config.is_hybrid,
        "its states are not tokens that could be evicted",
        ANOTHER_MODEL,
    ),
    Refusal(
        "attention in both directions within an image",
        lambda c: c.model_config.is_mm_prefix_lm,
        "a token would attend to later ones, which the kernels do not compute",
        ANOTHER_MODEL,
    ),
    Refusal(
        f"a multimodal model other than {', '.join(MULTIMODAL.values())}",
        untried_multimodal,
        "it has not been tried",
        ANOTHER_MODEL,
    ),
    Refusal(
        "a diffusion model",
        lambda c: c.model_config.is_diffusion,
        "it rewrites tokens that were computed",
        ANOTHER_MODEL,
    ),
    Refusal(
        "ALiBi",
        alibi,
        "the bias depends on distances that the kernels do not compute",
        ANOTHER_MODEL,
    ),
    Refusal(
        "a soft cap of the attention's logits",
        lambda c: bool(c.model_config.hf_text_config.to_dict().get("attn_logit_softcapping")),
        WHY_IN_LAYERS,
        ANOTHER_MODEL,
    ),
    Refusal(
        "a sliding window in every layer",
        slides_everywhere,
        "the policy evicts from full attention, and there is none",
        ANOTHER_MODEL,
    ),
    Refusal(
        "layers of other kinds than full attention and sliding windows",
        lambda c: bool(kinds(c) - {FULL_ATTENTION, SLIDING_ATTENTION}),
        "vLLM gives chunked-local attention the backend of full attention, and others keep states",
        ANOTHER_MODEL,
    ),
)
"""Those that ask the model alone: ``applies`` reads nothing but ``model_config``."""
REFUSALS: tuple[Refusal, ...] = (
    *MODEL_REFUSALS,
    Refusal(
        "an attention backend of your own for full attention",
        lambda c: c.attention_config.backend_per_kind[FULL_ATTENTION].name != "CUSTOM",
        WHY_OPTION["attention_backend"],
        "leave full_attention out of attention_config.backend_per_kind",
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
        "it has not been tried",
        "leave --kv-events-config out",
    ),
    Refusal(
        "prefix caching, and sliding windows",
        lambda c: c.cache_config.enable_prefix_caching and slides(c) and not bounds_hits(c),
        "what is found is cut back to where the request's own scores begin, and the window before "
        "that place may be gone",
        "leave --enable-prefix-caching out, or use vLLM 0.33, which looks no further than that",
    ),
    Refusal(
        "sliding windows whose tokens are all kept",
        lambda c: c.scheduler_config.disable_hybrid_kv_cache_manager and slides(c),
        "the policy's pages and vLLM's own would be one group",
        "leave --disable-hybrid-kv-cache-manager out",
    ),
    Refusal(
        f"sliding windows in pages that are no multiple of {CPU_PAGE} slots",
        lambda c: slides(c) and odd_pages(c),
        "vLLM's own attention computes these layers, and on a CPU takes no others",
        f"give --block-size {CPU_PAGE}, 64 or 128",
    ),
    Refusal(
        "prefix caching, and eviction='pressure'",
        lambda c: c.cache_config.enable_prefix_caching and policy_of(c).eviction == "pressure",
        "tokens after a prompt would score, and later be packed, in pages that others read",
        "use --kv-policy-config.eviction always, or leave --enable-prefix-caching out",
    ),
    Refusal(
        "prefix caching, and a prefill of which cached queries would score or evict",
        lambda c: c.cache_config.enable_prefix_caching and not policy_of(c).supports_prefix_caching,
        "a prefix that is found in the cache is not computed again: its scores would be missing",
        "use --kv-policy h2o with --kv-policy-config.prefill window (of at least 2 queries) and no "
        "mean score, a policy without scores, or leave --enable-prefix-caching out",
    ),
    Refusal(
        "chunks of prompts that may be smaller than the observation window",
        cuts_windows,
        "with prefix caching, and in a scoring pass, a window's queries are computed together",
        "give a larger --max-num-batched-tokens, fewer --max-num-seqs, a larger or no "
        "--long-prefill-token-threshold, or a smaller observation_window",
    ),
    Refusal(
        "speculative decoding other than by n-grams",
        lambda c: c.speculative_config is not None and c.speculative_config.method != "ngram",
        "a draft model keeps K and V of every token in the same rows of pages, which hold what "
        "survives here, and vLLM asks for them before the tokens are there",
        'use --speculative-config \'{"method": "ngram", ...}\', or leave it out',
    ),
    Refusal(
        "speculative decoding, and sliding windows",
        lambda c: c.speculative_config is not None and slides(c),
        "it has not been tried",
        "leave --speculative-config out",
    ),
    Refusal(
        "speculative decoding, and evict_every below num_speculative_tokens + 2",
        drafts_too_many,
        "which tokens go depends on attention of tokens that are certain: drafts fill slots while "
        "nothing is evicted, and the token with which some are is computed without drafts",
        "give a larger --kv-policy-config.evict_every, or fewer num_speculative_tokens",
    ),
    Refusal(
        "speculative decoding, and eviction='pressure'",
        lambda c: c.speculative_config is not None and policy_of(c).eviction == "pressure",
        "the two are not built together",
        "use --kv-policy-config.eviction always, or leave --speculative-config out",
    ),
    Refusal(
        "speculative decoding, and a lifetime of what an observation window gives",
        lambda c: c.speculative_config is not None and policy_of(c).keeps_scores,
        "drafts score a step later than they are computed, and it may be over by then",
        "use --kv-policy-config.window_lifetime 0, or leave --speculative-config out",
    ),
    Refusal(
        "speculative decoding, and pipeline parallelism",
        lambda c: c.speculative_config is not None and stages(c) > 1,
        "it has not been tried",
        "leave --pipeline-parallel-size or --speculative-config out",
    ),
    Refusal(
        "positions='rolling', and speculative decoding",
        lambda c: policy_of(c).rolls and c.speculative_config is not None,
        "drafts score a step later than they are computed, and may have been renumbered by then",
        "leave --speculative-config out",
    ),
    Refusal(
        "positions='rolling', and sliding windows",
        lambda c: policy_of(c).rolls and slides(c),
        "the layers that slide keep vLLM's own pages, whose tokens are not renumbered",
        ANOTHER_MODEL_ROLLS,
    ),
    Refusal(
        "positions='rolling', and layers that do without rotary embeddings",
        lambda c: policy_of(c).rolls and skips_rotation(c),
        "their keys do not depend on positions, and must not be rotated",
        ANOTHER_MODEL_ROLLS,
    ),
    Refusal(
        "positions='rolling', and several positions of a token (M-RoPE)",
        lambda c: policy_of(c).rolls and c.model_config.uses_mrope,
        "it has not been tried",
        ANOTHER_MODEL_ROLLS,
    ),
    Refusal(
        "positions='rolling', and images",
        lambda c: policy_of(c).rolls and c.model_config.is_multimodal_model,
        "it has not been tried",
        ANOTHER_MODEL_ROLLS,
    ),
    Refusal(
        "speculative decoding, and images",
        lambda c: c.speculative_config is not None and c.model_config.is_multimodal_model,
        "it has not been tried",
        "leave --speculative-config out",
    ),
    Refusal(
        "continuation, and speculative decoding",
        lambda c: policy_of(c).continuation and c.speculative_config is not None,
        "it has not been tried",
        "leave --speculative-config or --kv-policy-config.continuation out",
    ),
    Refusal(
        "continuation, and sliding windows",
        lambda c: policy_of(c).continuation and slides(c),
        "the layers that slide give back the pages of all that they have passed",
        "leave --kv-policy-config.continuation out",
    ),
    Refusal(
        "layers that share slots, and prefix caching, sliding windows or pipeline parallelism",
        lambda c: (
            policy_of(c).splits_layers
            and (c.cache_config.enable_prefix_caching or slides(c) or stages(c) > 1)
        ),
        "they are not built together",
        "leave the other option out, or give --kv-policy-config.split_layers false",
    ),
    Refusal(
        "score=reconstruction, and LoRA",
        lambda c: reads_again(c) and c.lora_config is not None,
        "the second reading is not told which adapter reads",
        f"{READ_ONCE}, or leave --enable-lora out",
    ),
    Refusal(
        "score=reconstruction, and pipeline parallelism or speculative decoding",
        lambda c: reads_again(c) and (stages(c) > 1 or c.speculative_config is not None),
        "the second reading is a forward pass of its own, which knows neither stages nor drafts",
        f"{READ_ONCE}, or leave these options out",
    ),
    Refusal(
        "score=reconstruction, and sliding windows, images, prompt embeddings or M-RoPE",
        lambda c: reads_again(c) and (slides(c) or has_more_than_tokens(c)),
        "the second reading has tokens and a position of each, and nothing for layers that slide",
        READ_ONCE,
    ),
    Refusal(
        "a KV cache quantised to anything but fp8 with one scale for each layer's K and V",
        lambda c: c.cache_config.cache_dtype not in CACHE_DTYPES,
        "a slot of the policy's page has no scales of its own, and a byte holds one number",
        "use --kv-cache-dtype fp8, fp8_e5m2 or auto",
    ),
    Refusal(
        "an fp8 KV cache, and merge",
        lambda c: float8(c) and policy_of(c).merges,
        "a token that takes others in would be rounded to 8 bits again with each of them",
        "leave merge out, or use --kv-cache-dtype auto",
    ),
    Refusal(
        "an fp8 KV cache, and positions='rolling'",
        lambda c: float8(c) and policy_of(c).rolls,
        "a token's K would be rounded to 8 bits again whenever it is renumbered",
        "use --kv-policy-config.positions original, or --kv-cache-dtype auto",
    ),
    Refusal(
        "an fp8 KV cache that some layers leave out",
        lambda c: float8(c) and bool(c.cache_config.kv_cache_dtype_skip_layers),
        "the policy's layers have pages of one size",
        "leave --kv-cache-dtype-skip-layers out",
    ),
    Refusal(
        "an fp8 KV cache on a GPU older than Ada",
        lambda c: float8(c) and old_gpu(c),
        "Triton has no float8 below compute capability 8.9",
        "use --kv-cache-dtype auto",
    ),
    Refusal(
        "data parallelism of a mixture of experts",
        lambda c: c.parallel_config.data_parallel_size > 1 and c.model_config.is_moe,
        "its replicas compute one layer together, which vLLM cannot do on a CPU: it is not tested",
        "run engines of their own behind a load balancer",
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
        "micro-batches of one step (--enable-dbo, --ubatch-size)",
        lambda c: c.parallel_config.use_ubatching,
        "the plan is for the whole batch of a step",
        "leave both out",
    ),
    Refusal(
        "a platform other than CPU and CUDA",
        foreign_platform,
        "there are no kernels for it",
        "use a CUDA or a CPU build of vLLM",
    ),
)
