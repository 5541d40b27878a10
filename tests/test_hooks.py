# SPDX-License-Identifier: Apache-2.0
"""Hooks: from flags and arguments to vLLM's options. Refusals are in options/test_refusals.py."""

from __future__ import annotations

import dataclasses
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.tiny_models import engine_args, engine_config, folder
from vllm_h2o import patches
from vllm_h2o.errors import ConfigError, PatchError
from vllm_h2o.hooks import check_config, prepare
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.flags import fold_policy
from vllm_h2o.patches import _with_policy
from vllm_h2o.patches._patch import Symbol
from vllm_h2o.paths import SCHEDULER, WORKER
from vllm_h2o.policy import policies

BUDGET = {"kv_policy_config": {"budget": 64}}
CUSTOM = AttentionBackendEnum.CUSTOM


@contextmanager
def reverted() -> Iterator[None]:
    """Run vLLM without the plugin."""
    for patch in patches.ALWAYS:
        patch.revert()
    try:
        yield
    finally:
        for patch in patches.ALWAYS:
            patch.apply()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Llama."""
    return folder(tmp_path_factory.mktemp("models"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    """The parser of every command with engine arguments, such as ``vllm serve``."""
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


Parsed = Callable[..., KVPolicyConfig | None]


@pytest.fixture(scope="module")
def parsed(parser: FlexibleArgumentParser, llama: str) -> Parsed:
    """Returns the policy of a command line."""

    def parse(*arguments: str) -> KVPolicyConfig | None:
        args = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", llama, *arguments]))
        return KVPolicyConfig.from_additional_config(args.additional_config)

    return parse


@pytest.mark.parametrize("policy", policies())
def test_flag_alone_takes_the_defaults(parsed: Parsed, policy: str) -> None:
    """``--kv-policy NAME``, in either spelling."""
    assert parsed("--kv-policy", policy) == KVPolicyConfig(policy)
    assert parsed(f"--kv_policy={policy}") == KVPolicyConfig(policy)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--kv-policy-config", '{"budget": 0.3}'], {"budget": 0.3}),
        (
            ["--kv-policy-config", '{"budget": 64, "num_sink_tokens": 3}'],
            {"budget": 64, "num_sink_tokens": 3},
        ),
        (["--kv-policy-config.budget", "0.3"], {"budget": 0.3}),
        (["--kv-policy-config.budget=64"], {"budget": 64}),
        (["--kv_policy_config.budget", "1.0"], {"budget": 1.0}),
        (
            ["--kv-policy-config.recent_ratio", "1", "--kv-policy-config.num_sink_tokens", "4"],
            {"recent_ratio": 1, "num_sink_tokens": 4},
        ),
        (["--kv_policy_config", '{"name": "h2o"}'], {}),
        (
            ["--kv-policy-config", '{"budget": 64}', "--kv-policy-config.num_sink_tokens", "5"],
            {"budget": 64, "num_sink_tokens": 5},
        ),
    ],
)
def test_options_flag_takes_every_form(
    parsed: Parsed, arguments: list[str], options: dict[str, Any]
) -> None:
    """JSON, dotted, with underscores, before or after the policy's name: the same options."""
    expected = KVPolicyConfig("h2o", **options)
    for line in (["--kv-policy", "h2o", *arguments], [*arguments, "--kv-policy", "h2o"]):
        assert parsed(*line) == expected


def test_no_flag_changes_nothing(parser: FlexibleArgumentParser, llama: str) -> None:
    """The arguments are stock vLLM's."""
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", llama]))
    assert args.additional_config == {}
    with reverted():
        stock = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        assert args == AsyncEngineArgs.from_cli_args(stock.parse_args(["--model", llama]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-policy", "h20"], "Did you mean 'h2o'"),
        (["--kv-policy", "h2o", "--kv-policy-config", "{budget: 3}"], "it is not JSON"),
        (["--kv-policy", "h2o", "--kv-policy-config.recent-ratio", "1"], "mean 'recent_ratio'"),
        (["--kv-policy-config.budget", "0.2"], "Name a policy: --kv-policy h2o"),
        (
            ["--kv-policy", "h2o", "--additional-config", '{"kv_policy": "local"}'],
            "These are two config",
        ),
    ],
)
def test_wrong_flags_stop_before_loading(
    parsed: Parsed, arguments: list[str], message: str
) -> None:
    """A wrong command line stops before anything is loaded."""
    with pytest.raises(ConfigError, match=message):
        parsed(*arguments)


def test_help_has_a_group(parser: FlexibleArgumentParser) -> None:
    """The group has the two flags, every policy and every option."""
    (group,) = [group for group in parser._action_groups if group.title == "KVPolicyConfig"]
    flags = {option for action in group._group_actions for option in action.option_strings}
    assert flags == {"--kv-policy", "--kv-policy-config"}
    text = ArgumentParser.format_help(parser)  # vLLM's own asks for a group by its title
    for policy in policies().values():
        assert f"- {policy.name}: {policy.summary.split()[0]}" in text
    for option in ("budget", "min_budget", "recent_ratio", "num_sink_tokens", "split"):
        assert f"- {option}: " in text


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_engine_args_take_two_keywords(kind: type[EngineArgs], llama: str) -> None:
    """``LLM(kv_policy=...)`` and the server's arguments."""
    args = kind(model=llama, kv_policy="h2o", kv_policy_config={"budget": 64}, seed=3)
    assert (args.model, args.seed) == (llama, 3)
    assert args.additional_config == {"kv_policy": KVPolicyConfig("h2o", 64).to_dict()}
    assert kind(llama, seed=3).additional_config == {}
    with pytest.raises(TypeError, match="kv_polici"):
        kind(llama, kv_polici="h2o")


def test_fold_policy_keeps_other_entries() -> None:
    """The caller's mapping does not change."""
    given = {"other": 1}
    args = SimpleNamespace(additional_config=given)
    assert fold_policy(args, None, None) is args
    assert args.additional_config is given
    assert fold_policy(args, "local", None) is args
    assert args.additional_config == {"other": 1, "kv_policy": KVPolicyConfig("local").to_dict()}
    assert given == {"other": 1}


@pytest.mark.parametrize("given", ["h2o", {"name": "h2o"}, {"budget": 0.2}, None])
def test_fold_policy_twice_alike_is_taken(given: Any) -> None:
    """The same policy in another form."""
    args = SimpleNamespace(additional_config={"kv_policy": given})
    fold_policy(args, "h2o", None)
    assert args.additional_config == {"kv_policy": KVPolicyConfig().to_dict()}


@pytest.mark.parametrize("given", ["local", {"budget": 0.3}, {"num_sink_tokens": 1}])
def test_fold_policy_twice_differently_is_refused(given: Any) -> None:
    """The message has both."""
    args = SimpleNamespace(additional_config={"kv_policy": given})
    with pytest.raises(ConfigError) as caught:
        fold_policy(args, "h2o", None)
    assert str(caught.value) == (
        f"kv-policy: kv_policy='h2o' is not supported: additional_config holds {given!r}. "
        "These are two configurations. Give one of them."
    )


def test_fold_policy_without_a_name_is_refused() -> None:
    """Options with a name inside are enough."""
    args = SimpleNamespace(additional_config=None)
    for options in ({"budget": 0.3}, '{"budget": 0.3}', {}):
        with pytest.raises(ConfigError) as caught:
            fold_policy(args, None, options)
        assert str(caught.value) == (
            f"kv-policy: kv_policy_config={options!r} is not supported: no kv_policy is given. "
            "The options would have no effect. Name a policy: --kv-policy h2o."
        )
    fold_policy(args, None, '{"name": "local"}')
    assert args.additional_config == {"kv_policy": KVPolicyConfig("local").to_dict()}


def test_prepare_without_a_policy_changes_nothing(llama: str) -> None:
    """It verifies nothing, either."""
    args = engine_args(llama, additional_config={"other": 1})
    before = dict(vars(args))
    assert prepare(args) is None
    assert vars(args) == before


def test_prepare_sets_five_options(llama: str) -> None:
    """Twice alike; the policy is carried in full."""
    args = engine_args(llama, additional_config={"kv_policy": "h2o", "other": 1})
    for _ in range(2):
        assert prepare(args) == KVPolicyConfig()
        assert (args.scheduler_cls, args.worker_cls) == (SCHEDULER, WORKER)
        assert args.attention_backend is None
        assert args.attention_config.backend_per_kind == {"full_attention": CUSTOM}
        assert args.enable_prefix_caching is False
        assert args.block_size == 128
        assert args.additional_config == {"kv_policy": KVPolicyConfig().to_dict(), "other": 1}


@pytest.mark.parametrize(("given", "pages"), [(None, 128), (32, 32)])
def test_block_size_is_known_before_the_budget(llama: str, given: int | None, pages: int) -> None:
    """The user's, or the default of a CPU."""
    options = {"evict_every": "page", "budget": 256, "recent_ratio": 0.0}
    args = engine_args(llama, kv_policy="h2o", kv_policy_config=options, block_size=given)
    assert args.create_engine_config().cache_config.block_size == pages


def test_block_size_on_a_gpu_is_left_to_vllm(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """prepare does not set it."""
    args = engine_args(llama, kv_policy="h2o", **BUDGET)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    prepare(args)
    assert args.block_size is None


@pytest.mark.parametrize(
    ("score", "asked", "cuda", "most"),
    [
        ("reconstruction", None, True, 0.3),
        ("reconstruction", 0.5, True, 0.5),
        ("reconstruction", None, False, None),
        ("combined", None, True, None),
    ],
)
def test_max_budget_on_a_gpu_is_set_for_layers(
    llama: str,
    monkeypatch: pytest.MonkeyPatch,
    score: str,
    asked: float | None,
    cuda: bool,
    most: float | None,
) -> None:
    """Memory is set aside for the largest budget of layers that share slots."""
    options = {"budget": 0.3, "max_budget": asked, "score": score}
    args = engine_args(llama, kv_policy="h2o2", kv_policy_config=options)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: cuda)
    config = prepare(args)
    assert config is not None and config.max_budget == most
    assert KVPolicyConfig.from_additional_config(args.additional_config) == config


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "OPTForCausalLM"])
def test_config_with_a_policy_has_its_classes(tmp_path: Path, architecture: str) -> None:
    """vLLM can build it twice from the same arguments."""
    args = engine_args(folder(tmp_path, architecture), kv_policy="h2o", **BUDGET)
    for config in (args.create_engine_config(), args.create_engine_config()):
        assert config.scheduler_config.scheduler_cls == SCHEDULER
        assert config.parallel_config.worker_cls == WORKER
        assert config.attention_config.backend is None
        assert config.attention_config.backend_per_kind == {"full_attention": CUSTOM}
        assert config.cache_config.enable_prefix_caching is False
        carried = KVPolicyConfig.from_additional_config(config.additional_config)
        assert carried == KVPolicyConfig("h2o", 64)


def test_policies_do_not_share_compiled_code(llama: str) -> None:
    """vLLM keeps compiled graphs by a hash that includes the policy."""
    options: list[dict[str, Any]] = [
        {},
        {"kv_policy": "h2o", **BUDGET},
        {"kv_policy": "local", **BUDGET},
        {"kv_policy": "h2o", "kv_policy_config": {"budget": 80}},
    ]
    hashes = {engine_config(llama, **each).compute_hash() for each in options}
    assert len(hashes) == len(options)


def described(config: VllmConfig) -> dict[str, str]:
    """Return every field of a config but the random id of each instance."""
    fields = (field.name for field in dataclasses.fields(config) if field.name != "instance_id")
    return {name: repr(getattr(config, name)) for name in fields}


@pytest.mark.parametrize(
    "options",
    [{}, {"enable_prefix_caching": True, "additional_config": {"other": 1}}, {"seed": 7}],
)
def test_without_a_policy_the_config_is_stock(llama: str, options: dict[str, Any]) -> None:
    """The plugin changes no field."""
    with_plugin = engine_config(llama, **options)
    with reverted():
        stock = engine_config(llama, **options)
    assert described(with_plugin) == described(stock)
    assert with_plugin.compute_hash() == stock.compute_hash()
    assert with_plugin.scheduler_config.scheduler_cls is None
    assert with_plugin.attention_config.backend is None
    assert with_plugin.attention_config.backend_per_kind == {}
    assert "H2o" not in repr(with_plugin) and "h2o" not in repr(with_plugin)


def test_check_config_without_a_policy_reads_nothing() -> None:
    """Any object passes."""
    config = object()
    assert check_config(config, None) is config


def test_an_unknown_vllm_stops_a_policy_alone(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a policy, a changed symbol is not verified."""
    wrong = Symbol("vllm.v1.core.sched.scheduler:Scheduler.schedule", "0" * 12)
    monkeypatch.setattr(_with_policy, "RELIED_UPON", (wrong,))
    engine_config(llama)
    with pytest.raises(PatchError, match=r"Scheduler\.schedule"):
        engine_config(llama, kv_policy="h2o", **BUDGET)
