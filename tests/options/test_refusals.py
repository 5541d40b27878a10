"""What does not go with a policy stops before an engine starts, in four parts, on real configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler

from tests.options.refusal import REFUSED_ELSEWHERE
from tests.tiny_models import engine_config, folder
from tools.docs import refusals
from vllm_h2o.errors import ConfigError, UnsupportedError
from vllm_h2o.hooks import check_config
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.refusals import REFUSALS
from vllm_h2o.paths import BACKEND, SCHEDULER, WORKER

LLAMA, GEMMA = "LlamaForCausalLM", "Gemma3ForCausalLM"
ANOTHER_MODEL = "run this model without --kv-policy"
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
EVENTS = {"enable_kv_cache_events": True, "publisher": "null"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
UNTRIED = "a multimodal model other than LLaVA, Qwen2.5-VL"
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    # what the engine has, architecture, options, what to do
    ("a pooling model", LLAMA, {"runner": "pooling"}, ANOTHER_MODEL),
    ("an encoder-decoder model", "WhisperForConditionalGeneration", {}, ANOTHER_MODEL),
    ("multi-head latent attention (MLA)", "DeepseekV2ForCausalLM", {}, ANOTHER_MODEL),
    ("an attention-free or hybrid (state-space) model", "MambaForCausalLM", {}, ANOTHER_MODEL),
    ("ALiBi", "BloomForCausalLM", {}, ANOTHER_MODEL),
    ("ALiBi", "FalconForCausalLM", {}, ANOTHER_MODEL),
    ("a sliding window in every layer", "MistralForCausalLM", {}, ANOTHER_MODEL),
    ("a soft cap of the attention's logits", "Gemma2ForCausalLM", {}, ANOTHER_MODEL),
    (
        "layers of other kinds than full attention and sliding windows",
        "Llama4ForCausalLM",
        {},
        ANOTHER_MODEL,
    ),
    (
        "attention in both directions within an image",
        "PaliGemmaForConditionalGeneration",
        {},
        ANOTHER_MODEL,
    ),
    (UNTRIED, "Qwen2AudioForConditionalGeneration", {}, ANOTHER_MODEL),
    (
        "sliding windows whose tokens are all kept",
        GEMMA,
        {"disable_hybrid_kv_cache_manager": True},
        "leave --disable-hybrid-kv-cache-manager out",
    ),
    (
        "sliding windows in pages that are no multiple of 32 slots",
        GEMMA,
        {"block_size": 16},
        "give --block-size 32, 64 or 128",
    ),
    (
        "an attention backend of your own for full attention",
        LLAMA,
        {"attention_config": {"backend_per_kind": {"full_attention": "CPU_ATTN"}}},
        "leave full_attention out of attention_config.backend_per_kind",
    ),
    (
        "a KV connector",
        LLAMA,
        {"kv_transfer_config": CONNECTOR},
        "leave --kv-transfer-config out",
    ),
    ("a KV connector", LLAMA, {"kv_offloading_size": 0.1}, "leave --kv-transfer-config out"),
    ("KV cache events", LLAMA, {"kv_events_config": EVENTS}, "leave --kv-events-config out"),
    (
        "speculative decoding other than by n-grams",
        LLAMA,
        {"speculative_config": NGRAM | {"method": "ngram_gpu"}},
        'use --speculative-config \'{"method": "ngram", ...}\', or leave it out',
    ),
    (
        "speculative decoding, and sliding windows",
        GEMMA,
        {"speculative_config": NGRAM},
        "leave --speculative-config out",
    ),
    (
        "prefix caching, and a prefill of which cached queries would score or evict",
        LLAMA,
        {"enable_prefix_caching": True},
        "use --kv-policy h2o with --kv-policy-config.prefill window (of at least 2 queries) and no "
        "mean score, a policy without scores, or leave --enable-prefix-caching out",
    ),
    (
        "data parallelism of a mixture of experts",
        "MixtralForCausalLM",
        {"data_parallel_size": 2},
        "run engines of their own behind a load balancer",
    ),
]
# Whatever cannot be had here as a whole: one property of a real config is turned over.
TURNED: list[tuple[str, type, str, Any, str]] = [
    ("a diffusion model", ModelConfig, "is_diffusion", True, ANOTHER_MODEL),
    (
        "context parallelism",
        ParallelConfig,
        "decode_context_parallel_size",
        2,
        "leave the context-parallel sizes at 1",
    ),
    (
        "micro-batches of one step (--enable-dbo, --ubatch-size)",
        ParallelConfig,
        "use_ubatching",
        True,
        "leave both out",
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny models lie."""
    return tmp_path_factory.mktemp("models")


def expected(what: str, remedy: str) -> str:
    """The message, with the reason from the table of refusals."""
    (why,) = {refusal.why for refusal in REFUSALS if refusal.what == what}
    return (
        f"kv-policy: asked: --kv-policy h2o; is: the engine has {what}; why not: {why}; "
        f"what to do: {remedy}."
    )


def policy_of(vllm_config: VllmConfig) -> KVPolicyConfig | None:
    """The policy that a finished config carries."""
    return KVPolicyConfig.from_additional_config(vllm_config.additional_config)


@pytest.mark.parametrize(("what", "architecture", "options", "remedy"), REFUSED)
def test_refused(
    models: Path, what: str, architecture: str, options: dict[str, Any], remedy: str
) -> None:
    """vLLM itself takes the engine; with a policy it stops in create_engine_config."""
    model = folder(models, architecture)
    engine_config(model, **options)
    with pytest.raises(UnsupportedError) as caught:
        engine_config(model, **options, kv_policy="h2o", kv_policy_config={"budget": 64})
    assert str(caught.value) == expected(what, remedy)


@pytest.mark.parametrize(("what", "owner", "name", "value", "remedy"), TURNED)
def test_refused_by_a_property(
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    owner: type,
    name: str,
    value: Any,
    remedy: str,
) -> None:
    """The property that is read is vLLM's own, and decides."""
    config = engine_config(folder(models, LLAMA), kv_policy="h2o", kv_policy_config={"budget": 64})
    monkeypatch.setattr(owner, name, property(lambda _: value, lambda *_: None))
    with pytest.raises(UnsupportedError) as caught:
        check_config(config, policy_of(config))
    assert str(caught.value) == expected(what, remedy)


def test_other_platforms(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no kernels yet, there is no engine."""
    config = engine_config(folder(models, LLAMA), kv_policy="h2o", kv_policy_config={"budget": 64})
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    with pytest.raises(UnsupportedError) as caught:
        check_config(config, policy_of(config))
    remedy = "use a CUDA or a CPU build of vLLM"
    assert str(caught.value) == expected("a platform other than CPU and CUDA", remedy)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    check_config(config, policy_of(config))


DRAFTING: list[tuple[str, dict[str, Any], dict[str, Any], str | None]] = [
    # policy, options, settings, what does not go with two drafts
    ("h2o", {"evict_every": 3}, {}, "evict_every below num_speculative_tokens + 2"),
    ("h2o", {"evict_every": 4}, {}, None),
    ("full", {}, {}, None),
    ("h2o", {"evict_every": 4, "eviction": "pressure"}, {}, "eviction='pressure'"),
    ("h2o", {"evict_every": 4}, {"pipeline_parallel_size": 2}, "pipeline parallelism"),
    (
        "h2o",
        {"evict_every": 4, "score": "combined"},
        {},
        "a lifetime of what an observation window gives",
    ),
    ("h2o2", {"evict_every": 4, "window_lifetime": 0}, {}, None),
]


@pytest.mark.parametrize(("policy", "options", "settings", "what"), DRAFTING)
def test_drafts(
    models: Path,
    policy: str,
    options: dict[str, Any],
    settings: dict[str, Any],
    what: str | None,
) -> None:
    """Two at most, and the tokens before and after them, between two evictions."""
    settings = {**settings, "speculative_config": NGRAM, "kv_policy": policy}
    if what is None:
        assert engine_config(folder(models, LLAMA), **settings, kv_policy_config=options)
        return
    with pytest.raises(UnsupportedError) as caught:
        engine_config(folder(models, LLAMA), **settings, kv_policy_config=options)
    what = f"speculative decoding, and {what}"
    (refusal,) = [each for each in REFUSALS if each.what == what]
    assert str(caught.value) == expected(what, refusal.remedy)


WINDOWS = "chunks of prompts that may be smaller than the observation window"


@pytest.mark.parametrize(
    ("limits", "fits"),
    [
        ({"max_num_batched_tokens": 96, "max_num_seqs": 33}, True),
        ({"max_num_batched_tokens": 96, "max_num_seqs": 34}, False),
        ({"max_num_batched_tokens": 96, "max_num_scheduled_tokens": 72, "max_num_seqs": 10}, False),
        ({"max_num_seqs": 8, "long_prefill_token_threshold": 63}, False),
        ({"max_num_seqs": 8, "long_prefill_token_threshold": 64}, True),
    ],
)
def test_windows_that_a_step_may_cut(models: Path, limits: dict[str, int], fits: bool) -> None:
    """64 queries must find room in one step, whatever the others take."""
    options = {"budget": 64, "prefill": "window"}
    asked = {"enable_prefix_caching": True, "kv_policy": "h2o", "kv_policy_config": options}
    if fits:
        assert engine_config(folder(models, LLAMA), **limits, **asked)
        return
    with pytest.raises(UnsupportedError) as caught:
        engine_config(folder(models, LLAMA), **limits, **asked)
    (remedy,) = {refusal.remedy for refusal in REFUSALS if refusal.what == WINDOWS}
    assert str(caught.value) == expected(WINDOWS, remedy)


@pytest.mark.parametrize(("max_tokens", "fits"), [(127, False), (128, True)])
def test_windows_of_a_scoring_pass(models: Path, max_tokens: int, fits: bool) -> None:
    """A prompt's chunks wait for half a step; the window must find room in that."""
    limits = {"max_num_scheduled_tokens": max_tokens, "max_num_seqs": 100}
    asked = {"kv_policy": "h2o2", "kv_policy_config": {"budget": 64}}
    if fits:
        assert engine_config(folder(models, LLAMA), **limits, **asked)
        return
    with pytest.raises(UnsupportedError, match=WINDOWS):
        engine_config(folder(models, LLAMA), **limits, **asked)


@pytest.mark.parametrize(
    ("policy", "options", "supported"),
    [
        ("h2o", {"prefill": "window"}, True),
        ("h2o", {"prefill": "window", "observation_window": 1}, False),
        ("h2o", {"prefill": "chunked"}, False),
        ("h2o2", {}, False),
        ("streaming", {}, True),
        ("streaming", {"prefill": "chunked"}, False),
        ("local", {}, True),
        ("random", {}, True),
        ("full", {}, True),
    ],
)
def test_who_supports_prefix_caching(policy: str, options: dict[str, Any], supported: bool) -> None:
    """Where survivors follow from what each request computes itself."""
    assert KVPolicyConfig.from_options(policy, options).supports_prefix_caching == supported


PRESSED = "prefix caching, and eviction='pressure'"


@pytest.mark.parametrize(
    "policy", [{"name": "streaming"}, {"name": "h2o", "prefill": "window"}], ids=str
)
def test_shared_prefixes_under_pressure(models: Path, policy: dict[str, Any]) -> None:
    """Refused where either alone is fine."""
    model = folder(models, LLAMA)
    pressed = {**policy, "budget": 64, "eviction": "pressure"}
    engine_config(model, additional_config={"kv_policy": pressed})
    with pytest.raises(UnsupportedError) as caught:
        engine_config(model, enable_prefix_caching=True, additional_config={"kv_policy": pressed})
    remedy = "use --kv-policy-config.eviction always, or leave --enable-prefix-caching out"
    message = expected(PRESSED, remedy)
    assert str(caught.value) == message.replace("--kv-policy h2o", f"--kv-policy {policy['name']}")


def test_every_refusal_is_tested() -> None:
    """No entry of the table is there unread."""
    tested = {what for what, *_ in [*REFUSED, *TURNED]} | {"a platform other than CPU and CUDA"}
    tested |= {WINDOWS, PRESSED, *REFUSED_ELSEWHERE}
    tested |= {f"speculative decoding, and {what}" for *_, what in DRAFTING if what}
    assert tested == {refusal.what for refusal in REFUSALS}


def test_the_table_in_the_docs() -> None:
    """It has a row for each (that docs/compatibility.md shows it, is tested in test_docs.py)."""
    shown = refusals()
    for refusal in REFUSALS:
        assert f"| {refusal.what} | {refusal.why} | {refusal.remedy} |" in shown


CUSTOM, CPU = "AttentionBackendEnum.CUSTOM", "AttentionBackendEnum.CPU_ATTN"
STOCK_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
OPTIONS: list[tuple[str, dict[str, Any], str, str]] = [
    # option, arguments, asked, needed
    ("scheduler_cls", {"scheduler_cls": STOCK_SCHEDULER}, STOCK_SCHEDULER, SCHEDULER),
    ("scheduler_cls", {"scheduler_cls": Scheduler}, str(Scheduler), SCHEDULER),
    ("worker_cls", {"worker_cls": STOCK_WORKER}, STOCK_WORKER, WORKER),
    ("attention_backend", {"attention_backend": "CPU_ATTN"}, CPU, CUSTOM),
    ("attention_backend", {"attention_backend": "cpu_attn"}, CPU, CUSTOM),
    ("attention_backend", {"attention_config": {"backend": "CPU_ATTN"}}, CPU, CUSTOM),
]


@pytest.mark.parametrize(("option", "arguments", "asked", "needed"), OPTIONS)
def test_foreign_options(
    models: Path, option: str, arguments: dict[str, Any], asked: str, needed: str
) -> None:
    """What the policy sets itself is not silently taken from a user who asks for something else."""
    model = folder(models, LLAMA)
    with pytest.raises(UnsupportedError) as caught:
        engine_config(model, kv_policy="h2o", **arguments)
    message = str(caught.value)
    start = (
        f"kv-policy: asked: {option}={asked} with --kv-policy h2o; "
        f"is: the policy needs {option}={needed}; why not: only its "
    )
    assert message.startswith(start)
    assert message.endswith(f"what to do: leave {option} out, or run without --kv-policy.")


@pytest.mark.parametrize(
    "arguments",
    [
        {"scheduler_cls": SCHEDULER},
        {"worker_cls": WORKER},
        {"worker_cls": "auto"},
        {"attention_backend": "custom"},
        {"attention_backend": "auto"},
        {"attention_config": {"backend": "CUSTOM"}},
        {"attention_config": {"backend_per_kind": {"full_attention": "CUSTOM"}}},
        {"attention_config": {"backend_per_kind": {"sliding_window": "CPU_ATTN"}}},
        {"enable_prefix_caching": False},
        {"async_scheduling": False},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_options_that_agree(models: Path, arguments: dict[str, Any]) -> None:
    """Asking for what the policy sets anyway is fine, in every form that vLLM takes."""
    config = engine_config(
        folder(models, LLAMA), kv_policy="h2o", kv_policy_config={"budget": 64}, **arguments
    )
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    backends = config.attention_config.backend_per_kind
    assert backends["full_attention"].get_path() == BACKEND


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [(GEMMA, {}), ("Gemma2ForCausalLM", {"attn_logit_softcapping": None})],
)
def test_sliding_windows_next_to_full_attention(
    models: Path, architecture: str, overrides: dict[str, Any]
) -> None:
    """They go with a policy; Gemma 2's do where its logits are not capped."""
    config = engine_config(folder(models, architecture), kv_policy="h2o", hf_overrides=overrides)
    assert config.cache_config.enable_prefix_caching is False


def test_budget_without_room(models: Path) -> None:
    """A fraction that comes to too few slots stops as early as the rest."""
    with pytest.raises(ConfigError, match="that is 1 slots of max_model_len=256"):
        engine_config(folder(models, LLAMA), kv_policy="h2o", kv_policy_config={"budget": 0.001})
