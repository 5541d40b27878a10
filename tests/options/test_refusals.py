# SPDX-License-Identifier: Apache-2.0
"""Refusals on real engine configs: a policy stops before an engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import envs
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler

from tests.tiny_models import engine_config, folder
from vllm_h2o.errors import ConfigError, UnsupportedError
from vllm_h2o.hooks import check_config
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.refusal import refuse
from vllm_h2o.options.refusals import REFUSALS
from vllm_h2o.options.remedies import advice
from vllm_h2o.options.traits import FLOAT8
from vllm_h2o.paths import BACKEND, SCHEDULER, WORKER

LLAMA, GEMMA = "LlamaForCausalLM", "Gemma3ForCausalLM"
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
EVENTS = {"enable_kv_cache_events": True, "publisher": "null"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    # what the engine has, architecture, vLLM's options
    ("a pooling model", LLAMA, {"runner": "pooling"}),
    ("an encoder-decoder model", "WhisperForConditionalGeneration", {}),
    ("multi-head latent attention (MLA)", "DeepseekV2ForCausalLM", {}),
    ("an attention-free (state-space) model", "MambaForCausalLM", {}),
    ("ALiBi or a soft cap of the attention's logits", "BloomForCausalLM", {}),
    ("ALiBi or a soft cap of the attention's logits", "FalconForCausalLM", {}),
    ("ALiBi or a soft cap of the attention's logits", "Gemma2ForCausalLM", {}),
    ("a sliding window in every layer", "MistralForCausalLM", {}),
    ("layers with neither full attention, a sliding window nor a state", "Llama4ForCausalLM", {}),
    (
        "attention in both directions within an image",
        "PaliGemmaForConditionalGeneration",
        {},
    ),
    (
        "a multimodal model other than LLaVA, Qwen2.5-VL, Qwen3-VL, Qwen3.5, InternVL",
        "Qwen2AudioForConditionalGeneration",
        {},
    ),
    (
        "layers of several kinds without the hybrid KV cache manager",
        GEMMA,
        {"disable_hybrid_kv_cache_manager": True},
    ),
    ("sliding windows with a block size that is no multiple of 32", GEMMA, {"block_size": 16}),
    (
        "another attention backend for full attention",
        LLAMA,
        {"attention_config": {"backend_per_kind": {"full_attention": "CPU_ATTN"}}},
    ),
    ("a KV connector that offloads to host memory", LLAMA, {"kv_offloading_size": 0.1}),
    (
        "ExampleConnector with several workers",
        LLAMA,
        {"kv_transfer_config": CONNECTOR, "tensor_parallel_size": 2},
    ),
    ("ExampleConnector without prefix caching", LLAMA, {"kv_transfer_config": CONNECTOR}),
    (
        "KV cache events with neither prefix caching nor continuation",
        LLAMA,
        {"kv_events_config": EVENTS},
    ),
    (
        "speculative decoding other than by n-grams",
        LLAMA,
        {"speculative_config": NGRAM | {"method": "ngram_gpu"}},
    ),
    ("more drafts than fit between two evictions", LLAMA, {"speculative_config": NGRAM}),
    *(
        ("a KV cache quantised to anything but fp8", LLAMA, {"kv_cache_dtype": dtype})
        for dtype in ("int8_per_token_head", "nvfp4")
    ),
    (
        "an fp8 KV cache in some layers alone",
        LLAMA,
        {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]},
    ),
    ("data parallelism of a mixture of experts", "MixtralForCausalLM", {"data_parallel_size": 2}),
]
# What no config on this machine has: one property of a real config is turned over.
TURNED: list[tuple[str, type, str, Any]] = [
    ("a diffusion model", ModelConfig, "is_diffusion", True),
    ("context parallelism", ParallelConfig, "decode_context_parallel_size", 2),
    ("context parallelism", ParallelConfig, "prefill_context_parallel_size", 2),
    ("micro-batches", ParallelConfig, "use_ubatching", True),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny models."""
    return tmp_path_factory.mktemp("models")


def expected(what: str, *given: str) -> str:
    """Return the message of a refusal, for a user who gave these arguments."""
    (row,) = [refusal for refusal in REFUSALS if refusal.what == what]
    remedy = advice(row.remedy, frozenset(given))
    error = UnsupportedError("--kv-policy h2o", f"the engine has {what}", row.why, remedy)
    return str(error)


def policy_of(vllm_config: VllmConfig) -> KVPolicyConfig | None:
    """Return the policy of a finished config."""
    return KVPolicyConfig.from_additional_config(vllm_config.additional_config)


@pytest.mark.parametrize(("what", "architecture", "settings"), REFUSED)
def test_engine_is_refused(
    models: Path, what: str, architecture: str, settings: dict[str, Any]
) -> None:
    """vLLM itself takes the engine; with a policy it stops in create_engine_config."""
    model = folder(models, architecture)
    engine_config(model, **settings)
    with pytest.raises(UnsupportedError) as caught:
        engine_config(model, **settings, kv_policy="h2o", kv_policy_config={"budget": 64})
    assert str(caught.value) == expected(what, *settings)


CONNECTORS: list[tuple[str, dict[str, str]]] = [
    ("LMCache", {"kv_connector": "LMCacheConnectorV1"}),
    ("a KV connector other than ExampleConnector", {"kv_connector": "NixlConnector"}),
    ("a KV connector other than ExampleConnector", {"kv_connector_module_path": "own"}),
]


@pytest.mark.parametrize(("what", "changed"), CONNECTORS)
def test_connector_is_refused(models: Path, what: str, changed: dict[str, str]) -> None:
    """ExampleConnector itself is taken; others are not installed here."""
    asked = {"kv_policy": "snapkv", "kv_policy_config": {"budget": 64, "observation_window": 8}}
    on = {"kv_transfer_config": CONNECTOR, "enable_prefix_caching": True}
    config = engine_config(folder(models, LLAMA), **asked, **on)
    for name, value in changed.items():
        setattr(config.kv_transfer_config, name, value)
    with pytest.raises(UnsupportedError) as caught:
        refuse(REFUSALS, policy_of(config).setup(config), "--kv-policy h2o", "the engine has")
    assert str(caught.value) == expected(what)


@pytest.mark.parametrize(("what", "owner", "name", "value"), TURNED)
def test_engine_is_refused_by_a_property(
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    owner: type,
    name: str,
    value: Any,
) -> None:
    """The property is vLLM's own."""
    config = engine_config(folder(models, LLAMA), kv_policy="h2o", kv_policy_config={"budget": 64})
    monkeypatch.setattr(owner, name, property(lambda _: value, lambda *_: None))
    with pytest.raises(UnsupportedError) as caught:
        check_config(config, policy_of(config))
    assert str(caught.value) == expected(what)


def test_platform_without_kernels_is_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU and CUDA have kernels."""
    config = engine_config(folder(models, LLAMA), kv_policy="h2o", kv_policy_config={"budget": 64})
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    with pytest.raises(UnsupportedError) as caught:
        check_config(config, policy_of(config))
    assert str(caught.value) == expected("a platform other than CPU and CUDA")
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    check_config(config, policy_of(config))


@pytest.mark.parametrize(
    "asked",
    [
        {"kv_policy": "snapkv", "enable_prefix_caching": True},
        {"kv_policy": "h2o", "kv_policy_config": {"continuation": True}},
    ],
)
def test_events_of_pages_or_entries_are_taken(models: Path, asked: dict[str, Any]) -> None:
    """Pages of prompts that a prefix finds are published, and caches of ended requests."""
    assert engine_config(folder(models, LLAMA), kv_events_config=EVENTS, **asked)


@pytest.mark.parametrize("switch", ["0", "1"])
def test_older_ray_executor_is_refused(
    models: Path, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    """Its newer one, which is vLLM's default, passes the plan on."""
    config = engine_config(folder(models, LLAMA), kv_policy="h2o", kv_policy_config={"budget": 64})
    config.parallel_config.distributed_executor_backend = "ray"
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", switch)
    known = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND" in envs.environment_variables
    if switch == "1" or not known:
        assert check_config(config, policy_of(config))
        return
    with pytest.raises(UnsupportedError) as caught:
        check_config(config, policy_of(config))
    assert str(caught.value) == expected("vLLM's older Ray executor")


OLD_GPU = "an fp8 KV cache on a GPU older than Ada"


def test_fp8_on_an_old_gpu_is_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ada has compute capability 8.9."""
    config = engine_config(folder(models, LLAMA), kv_cache_dtype=FLOAT8[0], kv_policy="h2o")
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    for capability in (86, 89):
        monkeypatch.setattr(
            type(current_platform),
            "has_device_capability",
            classmethod(lambda _, wanted, own=capability: own >= wanted),
        )
        if capability < 89:
            with pytest.raises(UnsupportedError) as caught:
                check_config(config, policy_of(config))
            assert str(caught.value) == expected(OLD_GPU)
        else:
            assert check_config(config, policy_of(config)) is config


HITS = "prefix caching and sliding windows"


@pytest.mark.parametrize("bounded", [False, True])
def test_prefix_caching_with_windows_needs_bounded_hits(
    models: Path, monkeypatch: pytest.MonkeyPatch, bounded: bool
) -> None:
    """vLLM 0.33 bounds them."""
    monkeypatch.setattr("vllm_h2o.options.refusals.bounds_hits", lambda _: bounded)
    asked: dict[str, Any] = {"enable_prefix_caching": True, "kv_policy": "snapkv"}
    if bounded:
        assert engine_config(folder(models, GEMMA), **asked)
        return
    with pytest.raises(UnsupportedError) as caught:
        engine_config(folder(models, GEMMA), **asked)
    assert str(caught.value) == expected(HITS).replace("policy h2o", "policy snapkv")


CHUNKS = "prompt chunks that may be smaller than the observation window"
WINDOWS = "steps whose room for a prompt may be smaller than the observation window"


@pytest.mark.parametrize(
    ("policy", "limits", "fits"),
    [
        ("snapkv", {"max_num_batched_tokens": 96, "max_num_seqs": 33}, True),
        ("snapkv", {"max_num_batched_tokens": 96, "max_num_seqs": 34}, False),
        ("snapkv", {"max_num_scheduled_tokens": 72, "max_num_seqs": 10}, False),
        ("snapkv", {"max_num_seqs": 8, "long_prefill_token_threshold": 63}, False),
        ("snapkv", {"max_num_seqs": 8, "long_prefill_token_threshold": 64}, True),
        # Chunks of a prompt that is scored twice wait for half a step.
        ("h2o2", {"max_num_scheduled_tokens": 127, "max_num_seqs": 100}, False),
        ("h2o2", {"max_num_scheduled_tokens": 128, "max_num_seqs": 100}, True),
    ],
)
def test_window_must_fit_into_a_step(
    models: Path, policy: str, limits: dict[str, int], fits: bool
) -> None:
    """Its 64 queries are computed together, whatever the others take."""
    asked = {"kv_policy": policy, "kv_policy_config": {"budget": 64}}
    if fits:
        assert engine_config(folder(models, LLAMA), **limits, **asked)
        return
    with pytest.raises(UnsupportedError) as caught:
        engine_config(folder(models, LLAMA), **limits, **asked)
    what = CHUNKS if "long_prefill_token_threshold" in limits else WINDOWS
    assert str(caught.value) == expected(what, *limits).replace("policy h2o", f"policy {policy}")


@pytest.mark.parametrize(
    ("policy", "options", "fits"),
    [
        ("h2o", {"evict_every": 3}, False),
        ("h2o", {"evict_every": 4}, True),
        ("h2o2", {"evict_every": 4}, True),
        ("h2o2", {"evict_every": "page"}, True),
        ("full", {}, True),
    ],
)
def test_drafts_must_fit_between_evictions(
    models: Path, policy: str, options: dict[str, Any], fits: bool
) -> None:
    """Two drafts, and the tokens before and after them."""
    asked: dict[str, Any] = {"speculative_config": NGRAM, "block_size": 16}
    asked |= {"kv_policy": policy, "kv_policy_config": options}
    if fits:
        assert engine_config(folder(models, LLAMA), **asked)
        return
    with pytest.raises(UnsupportedError) as caught:
        engine_config(folder(models, LLAMA), **asked)
    assert str(caught.value) == expected("more drafts than fit between two evictions", *asked)


def test_every_refusal_is_tested() -> None:
    """No entry of the table is there unread."""
    tested = {what for what, *_ in [*REFUSED, *TURNED, *CONNECTORS]}
    tested |= {CHUNKS, WINDOWS, OLD_GPU, HITS}
    tested |= {"a platform other than CPU and CUDA", "vLLM's older Ray executor"}
    assert tested == {refusal.what for refusal in REFUSALS}


STOCK_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
OPTIONS: list[tuple[str, dict[str, Any], str, str]] = [
    # option, arguments, asked, needed
    ("--scheduler-cls", {"scheduler_cls": STOCK_SCHEDULER}, STOCK_SCHEDULER, SCHEDULER),
    ("--scheduler-cls", {"scheduler_cls": Scheduler}, str(Scheduler), SCHEDULER),
    ("--worker-cls", {"worker_cls": STOCK_WORKER}, STOCK_WORKER, WORKER),
    ("--attention-backend", {"attention_backend": "CPU_ATTN"}, "CPU_ATTN", "CUSTOM"),
    ("--attention-backend", {"attention_backend": "cpu_attn"}, "CPU_ATTN", "CUSTOM"),
    (
        "--attention-config.backend",
        {"attention_config": {"backend": "CPU_ATTN"}},
        "CPU_ATTN",
        "CUSTOM",
    ),
]


@pytest.mark.parametrize(("option", "arguments", "asked", "needed"), OPTIONS)
def test_option_that_the_policy_sets_is_refused(
    models: Path, option: str, arguments: dict[str, Any], asked: str, needed: str
) -> None:
    """The user's other value is not replaced silently."""
    model = folder(models, LLAMA)
    with pytest.raises(UnsupportedError) as caught:
        engine_config(model, kv_policy="h2o", **arguments)
    message = str(caught.value)
    assert message.startswith(
        f"kv-policy: {option} {asked} with --kv-policy h2o is not supported: "
        f"the policy needs {option} {needed}. Only "
    )
    assert message.endswith(f" Leave {option} out, or run without --kv-policy.")


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
def test_option_as_the_policy_sets_it_is_taken(models: Path, arguments: dict[str, Any]) -> None:
    """In every form that vLLM takes."""
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
def test_sliding_windows_next_to_full_attention_are_taken(
    models: Path, architecture: str, overrides: dict[str, Any]
) -> None:
    """Gemma 2 where its logits have no cap."""
    config = engine_config(folder(models, architecture), kv_policy="h2o", hf_overrides=overrides)
    assert config.cache_config.enable_prefix_caching is False


def test_budget_without_room_is_refused(models: Path) -> None:
    """A fraction with too few slots stops as early as the rest."""
    with pytest.raises(ConfigError, match="it is 1 slot of max_model_len=256"):
        engine_config(folder(models, LLAMA), kv_policy="h2o", kv_policy_config={"budget": 0.001})
