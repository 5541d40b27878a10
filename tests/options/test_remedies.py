# SPDX-License-Identifier: Apache-2.0
"""Remedies: a refusal names the flag that led to it, and none that was not given."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from vllm.config import ParallelConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.tiny_models import engine_config, folder
from vllm_h2o.errors import KVPolicyError
from vllm_h2o.hooks import check_config
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.remedies import (
    advice,
    another_dtype,
    given_arguments,
    leave_out,
    other_model,
)

LLAMA, GEMMA, MIXTRAL = "LlamaForCausalLM", "Gemma3ForCausalLM", "MixtralForCausalLM"
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
VALUES: dict[str, tuple[str, ...]] = {
    "attention_backend": ("CPU_ATTN",),
    "attention_config": (
        '{"backend": "CPU_ATTN"}',
        '{"backend_per_kind": {"full_attention": "CPU_ATTN"}}',
    ),
    "hf_overrides": (
        '{"sliding_window": 16, "layer_types": ["sliding_attention"]}',
        '{"is_encoder_decoder": true}',
        '{"attn_logit_softcapping": 5.0}',
        '{"no_rope_layers": [1]}',
    ),
    "kv_events_config": ('{"enable_kv_cache_events": true, "publisher": "null"}',),
    "kv_transfer_config": ('{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}',),
    "scheduler_cls": ("vllm.v1.core.sched.scheduler.Scheduler",),
    "speculative_config": (json.dumps(NGRAM), json.dumps(NGRAM | {"method": "ngram_gpu"})),
    "worker_cls": ("vllm.v1.worker.cpu_worker.CPUWorker",),
}
"""Values of flags that take neither a number nor a choice."""
EVERY_CHOICE = {"runner", "convert", "kv_cache_dtype"}
"""Other flags are tried with their last choice."""
OURS = {"model", "kv_policy", "kv_policy_config", "additional_config"}
UNTRIED = {"logging_config", "log_level", "log_config_file"}
"""They change the logging of the process."""
ASKED_FOR = {"--max-num-batched-tokens", "--max-num-seqs", "--contextual-sparsity"} | {
    "--enable-prefix-caching"
}
"""Flags that a remedy may ask for where another was given."""
SERVED = {  # policy and its options, model, flags that are refused
    "h2o": (
        ["--kv-policy", "h2o", "--kv-policy-config.budget", "64"],
        LLAMA,
        {"runner", "convert", "hf_overrides", "worker_cls", "scheduler_cls", "attention_backend"}
        | {"attention_config", "kv_cache_dtype", "enable_prefix_caching", "kv_offloading_size"}
        | {"speculative_config", "kv_transfer_config", "kv_events_config"},
    ),
    "snapkv": (
        ["--kv-policy", "snapkv", "--kv-policy-config.evict_every", "8"],
        GEMMA,
        {"block_size", "disable_hybrid_kv_cache_manager", "max_num_batched_tokens"}
        | {"max_num_scheduled_tokens", "long_prefill_token_threshold", "speculative_config"},
    ),
    "reread": (
        ["--kv-policy", "h2o2", "--kv-policy-config", '{"score": "reconstruction"}'],
        MIXTRAL,
        {"pipeline_parallel_size", "enable_lora", "enable_prompt_embeds", "data_parallel_size"},
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """Every flag of ``vllm serve`` that an engine reads."""
    made: argparse.ArgumentParser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return made


def values(action: argparse.Action) -> list[list[str]]:
    """Return values of a flag that may lead somewhere."""
    if action.dest in VALUES:
        return [[value] for value in VALUES[action.dest]]
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return [[]]
    chosen = [str(value) for value in action.choices or (2,) if value is not None]
    return [[value] for value in (chosen if action.dest in EVERY_CHOICE else chosen[-1:])]


def flags_in(remedy: str) -> set[str]:
    """Return the flags that a remedy names, without their keys."""
    return set(re.findall(r"--[a-z-]+", remedy))


BY_VLLM = (AssertionError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What vLLM raises for arguments that it does not take."""


def refusal(make: Callable[..., EngineArgs], *args: Any, **keywords: Any) -> KVPolicyError | None:
    """Return the refusal of these arguments; None: they are taken, or vLLM refuses them."""
    try:
        make(*deepcopy(args), **deepcopy(keywords)).create_engine_config()
    except KVPolicyError as error:
        return error
    except BY_VLLM:
        return None
    return None


@pytest.mark.slow
@pytest.mark.parametrize("case", SERVED)
def test_refusal_names_the_flag_that_was_typed(
    models: Path, parser: argparse.ArgumentParser, case: str
) -> None:
    """Every flag of vLLM, one at a time; as a keyword argument it is refused likewise."""
    policy, architecture, expected = SERVED[case]
    base = ["--model", folder(models, architecture), "--skip-tokenizer-init", *policy]
    refused = set()
    for action in parser._actions:
        if action.dest in OURS | UNTRIED or "--help" in action.option_strings:
            continue
        typed = next(name for name in action.option_strings if name.startswith("--"))
        for value in values(action):
            try:
                # vLLM changes what is a default in the parser.
                parsed = deepcopy(parser.parse_args([*base, typed, *value]))
            except SystemExit:
                continue
            error = refusal(AsyncEngineArgs.from_cli_args, parsed)
            if error is None:
                continue
            refused.add(action.dest)
            named = flags_in(error.remedy)
            assert typed in named, (typed, value, str(error))
            assert named <= {typed, "--kv-policy", *ASKED_FOR}, (typed, value, str(error))
            keywords = {name: getattr(parsed, name) for name in {action.dest, *OURS}}
            as_keyword = refusal(EngineArgs, **keywords, skip_tokenizer_init=True)
            assert str(as_keyword) == str(error)
    assert refused >= expected


FEW_TOKENS = ("--max-num-batched-tokens", "128", "--max-num-seqs", "128")
ROLLS = '{"positions": "rolling", "eviction": "chunk", "budget": 64}'
TOGETHER: list[tuple[list[str], str]] = [
    # typed, remedy
    (
        ["--kv-policy-config", ROLLS, "--max-num-batched-tokens", "128"]
        + ["--kv-cache-dtype", "fp8"],
        "use positions=original, or use --kv-cache-dtype auto",
    ),
    (
        ["--kv-policy-config", ROLLS, "--max-num-batched-tokens", "128"]
        + ["--hf-overrides", '{"no_rope_layers": [1]}'],
        "choose another model, or change what makes it so in --hf-overrides, or use "
        "positions=original",
    ),
    (
        ["--kv-transfer-config", *VALUES["kv_transfer_config"], "--kv-offloading-size", "1"],
        "leave --kv-transfer-config and --kv-offloading-size out",
    ),
    (
        # Events that are off lead nowhere.
        ["--kv-events-config", '{"publisher": "null"}', "--kv-offloading-size", "1"],
        "leave --kv-offloading-size out",
    ),
    (
        ["--spec-method", "ngram_gpu", "--spec-tokens", "2"],
        "give --spec-method ngram, or leave --spec-method and --spec-tokens out",
    ),
    (
        ["--spec-model", "MODEL", "--spec-tokens", "2"],
        "give --spec-method ngram without --spec-model, or leave --spec-model and --spec-tokens "
        "out",
    ),
    (
        ["--spec-method", "ngram", "--spec-tokens", "2"],
        "give a larger evict_every, or fewer --spec-tokens",
    ),
    (
        ["-sc", json.dumps(NGRAM)],
        "give a larger evict_every, or fewer num_speculative_tokens in --speculative-config",
    ),
    (
        ["--spec-method", "ngram", "--spec-tokens", "2", "--kv-policy-config.eviction", "pressure"]
        + ["--kv-policy-config.evict_every", "4"],
        "leave --spec-method and --spec-tokens out, or use eviction=prompt_end",
    ),
    (
        ["--kv-policy-config.name", "snapkv", *FEW_TOKENS],
        "give a larger --max-num-batched-tokens, fewer --max-num-seqs, or a smaller "
        "observation_window",
    ),
    (
        ["--kv-policy-config.name", "snapkv", *FEW_TOKENS, "--max-num-scheduled-tokens", "100"],
        "give a larger --max-num-scheduled-tokens, fewer --max-num-seqs, or a smaller "
        "observation_window",
    ),
    (
        ["--kv-policy-config.name", "snapkv", "--max-num-batched-tokens", "140"]
        + ["--max-num-seqs", "32", "--spec-method", "ngram", "--spec-tokens", "2"],
        "give a larger --max-num-batched-tokens, fewer --max-num-seqs, fewer drafts "
        "(--spec-method and --spec-tokens), or a smaller observation_window",
    ),
]


@pytest.mark.parametrize(("typed", "remedy"), TOGETHER)
def test_refusal_names_the_flags_that_were_typed_together(
    models: Path, parser: argparse.ArgumentParser, typed: list[str], remedy: str
) -> None:
    """A state to which several flags lead is left by those that were given."""
    model = folder(models, LLAMA)
    policy = [] if "--kv-policy-config.name" in typed else ["--kv-policy", "h2o"]
    base = ["--model", model, "--skip-tokenizer-init", *policy]
    parsed = parser.parse_args([*base, *(model if arg == "MODEL" else arg for arg in typed)])
    error = refusal(AsyncEngineArgs.from_cli_args, parsed)
    assert error is not None
    assert error.remedy == remedy


def test_remedy_without_a_flag_says_what_else_leads_there() -> None:
    """The checkpoint, the environment, or the model itself."""
    none: frozenset[str] = frozenset()
    dtype = another_dtype("auto")
    own = "use --kv-cache-dtype bfloat16, or whichever dtype the model computes in"
    assert advice(dtype, none) == own
    assert advice(dtype, frozenset({"kv_cache_dtype"})) == "use --kv-cache-dtype auto"
    assert advice(other_model("runner"), none) == "run this model without --kv-policy"
    assert advice(leave_out("a_b", otherwise="c"), none) == "c"
    assert advice(leave_out("a_b", otherwise="c"), frozenset({"a_b"})) == "leave --a-b out"


def test_argument_at_its_default_was_not_given(models: Path) -> None:
    """As ``LLM`` passes most of them."""
    args = EngineArgs(model=folder(models, LLAMA), runner="auto", hf_overrides={}, seed=0)
    assert given_arguments(args) == {"model"}
    args.speculative_config = NGRAM
    assert given_arguments(args) == {"model", "speculative_config"}


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("decode_context_parallel_size", "leave --decode-context-parallel-size out"),
        ("prefill_context_parallel_size", "leave --prefill-context-parallel-size out"),
        ("enable_dbo", "leave --enable-dbo out"),
        ("ubatch_size", "leave --ubatch-size out"),
    ],
)
def test_refusal_of_what_a_cpu_does_not_have_names_its_flag(
    models: Path, monkeypatch: pytest.MonkeyPatch, argument: str, remedy: str
) -> None:
    """vLLM itself refuses or drops it here: the finished config is changed."""
    config = engine_config(folder(models, LLAMA), kv_policy="h2o")
    name = argument if "context" in argument else "use_ubatching"
    monkeypatch.setattr(ParallelConfig, name, property(lambda _: 2, lambda *_: None))
    with pytest.raises(KVPolicyError) as caught:
        check_config(config, KVPolicyConfig.of(config), given=frozenset({argument}))
    assert caught.value.remedy == remedy


def test_longest_sequence_without_room_for_a_budget_is_named(models: Path) -> None:
    """No budget of it is enough."""
    options = {"num_sink_tokens": 4, "budget": 64}
    with pytest.raises(KVPolicyError, match=r"Give --max-model-len 6 or more, or fewer sinks\."):
        engine_config(
            folder(models, LLAMA), kv_policy="h2o", kv_policy_config=options, max_model_len=4
        )
