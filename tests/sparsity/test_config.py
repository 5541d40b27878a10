# SPDX-License-Identifier: Apache-2.0
"""Options of contextual sparsity: how they are given, what is set, and what is refused."""

from __future__ import annotations

import logging
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.tiny_models import CONFIGS, engine_args, engine_config, folder
from vllm_h2o.errors import SparsityError
from vllm_h2o.sparsity.config import KEY, MODES, SparsityConfig
from vllm_h2o.sparsity.flags import add_sparsity_flags, fold_sparsity
from vllm_h2o.sparsity.hooks import check_sparsity, prepare_sparsity


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny OPT with ReLU."""
    return folder(tmp_path_factory.mktemp("models"), "OPTForCausalLM")


def test_flags_reach_additional_config(opt: str) -> None:
    """On a command line, and as arguments."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = ["--contextual-sparsity", "exact", "--contextual-sparsity-config.max_tokens", "4"]
    made = EngineArgs.from_cli_args(parser.parse_args(["--model", opt, *flags]))
    wanted = {KEY: {"mode": "exact", "max_tokens": 4}}
    assert made.additional_config == wanted
    options = {"contextual_sparsity_config": {"max_tokens": 4}}
    assert engine_args(opt, contextual_sparsity="exact", **options).additional_config == wanted
    predicted = engine_args(opt, contextual_sparsity="predicted", **options).additional_config
    assert predicted == {KEY: {"mode": "predicted", "max_tokens": 4, "recall": 0.99}}
    assert SparsityConfig.from_additional_config(predicted) == SparsityConfig("predicted", 4)


def test_start_says_what_is_skipped(
    opt: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mode, layers and kernels."""
    made = engine_config(opt)  # vLLM sets the levels of its loggers meanwhile
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, "vllm.contextual_sparsity"):
        for mode in MODES:
            check_sparsity(made, SparsityConfig(mode))
    lines = [r.getMessage() for r in caplog.records if r.name == "vllm.contextual_sparsity"]
    exact, predicted = dict.fromkeys(lines)  # other tests may have left a second handler
    assert "exact, recall 1, 1 layers, kernels " in exact and exact.endswith("rows of fc2.")
    assert "predicted, recall 0.99, 1 layers" in predicted
    assert predicted.endswith("rows of fc1 and fc2.")


def test_flags_say_their_modes() -> None:
    """In the help of every command that takes engine arguments."""
    text = add_sparsity_flags(ArgumentParser()).format_help()
    assert "--contextual-sparsity" in text and "max_tokens" in text


def test_config_sets_quantization(opt: str) -> None:
    """With and without a policy; a second config of the same arguments is the same."""
    for policy in ({}, {"kv_policy": "h2o", "kv_policy_config": {"budget": 64}}):
        args = engine_args(opt, contextual_sparsity="exact", **policy)
        for _ in range(2):
            made = args.create_engine_config()
            assert made.model_config.quantization == KEY
            assert SparsityConfig.from_additional_config(made.additional_config) is not None
    assert engine_config(opt).quant_config is None


@pytest.mark.parametrize(
    ("mode", "options", "words"),
    [
        ("sometimes", None, "the modes are exact"),
        ("exact", {"max_tokens": 0}, "a whole number from 1 to 32"),
        ("exact", {"max_tokens": True}, "a whole number from 1 to 32"),
        ("exact", {"rank": 8}, "the options are max_tokens, recall"),
        ("exact", {"recall": 0.9}, "contextual_sparsity is exact"),
        ("predicted", {"recall": 1}, "a number from 0.5 to 0.9999"),
        ("predicted", {"recall": 0.1}, "a number from 0.5 to 0.9999"),
        ("exact", "{", "the options are max_tokens"),
        (None, {"max_tokens": 8}, "no contextual_sparsity is given"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    mode: str | None, options: Any, words: str, opt: str
) -> None:
    """With what would do."""
    with pytest.raises(SparsityError, match=r"^contextual-sparsity: .* is not supported") as caught:
        fold_sparsity(engine_args(opt), mode, options)
    assert words in str(caught.value)


def test_two_configurations_are_refused(opt: str) -> None:
    """Equal ones are one."""
    args = engine_args(opt, additional_config={KEY: "exact"})
    fold_sparsity(args, "exact", None)
    with pytest.raises(SparsityError, match="two configurations"):
        fold_sparsity(args, "exact", {"max_tokens": 2})


def test_models_without_relu_are_refused(opt: str, tmp_path: Path) -> None:
    """Another family, and an OPT with another activation (Galactica)."""
    llama = folder(tmp_path, "LlamaForCausalLM")
    with pytest.raises(SparsityError, match="the model is llama with silu"):
        engine_config(llama, contextual_sparsity="exact")
    config = CONFIGS["OPTForCausalLM"]()
    config.architectures, config.activation_function = ["OPTForCausalLM"], "gelu"
    config.save_pretrained(tmp_path / "galactica")
    with pytest.raises(SparsityError, match="the model is opt with gelu"):
        engine_config(str(tmp_path / "galactica"), contextual_sparsity="exact")


def test_other_devices_are_refused(opt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a CPU nor a GPU of NVIDIA."""
    made = engine_config(opt)
    other = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False, device_name="rocm")
    monkeypatch.setattr("vllm.platforms.current_platform", other)
    with pytest.raises(SparsityError, match="the platform is rocm"):
        check_sparsity(made, SparsityConfig("exact"))


def test_batch_invariance_is_refused(opt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's sums depend on the rows that others of the step use."""
    made = engine_config(opt)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(SparsityError, match="VLLM_BATCH_INVARIANT is set"):
        check_sparsity(made, SparsityConfig("exact"))


def test_lora_is_refused(opt: str) -> None:
    """An adapter of fc2 is not skipped."""
    with pytest.raises(SparsityError, match="LoRA is enabled"):
        engine_config(opt, contextual_sparsity="exact", enable_lora=True)


def test_other_quantization_is_refused(opt: str, tmp_path: Path) -> None:
    """Asked for, or the checkpoint's own."""
    args = engine_args(opt, contextual_sparsity="exact", quantization="fp8")
    with pytest.raises(SparsityError, match="--quantization is fp8"):
        prepare_sparsity(args)
    config = CONFIGS["OPTForCausalLM"]()
    config.architectures = ["OPTForCausalLM"]
    config.quantization_config = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    config.save_pretrained(tmp_path / "gptq")
    with pytest.raises(SparsityError, match="the checkpoint is quantized"):
        engine_config(str(tmp_path / "gptq"), contextual_sparsity="exact")
