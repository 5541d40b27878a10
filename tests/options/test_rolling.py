"""Positions that roll: what they need, what is refused, and how long sequences may be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from vllm.config import ModelConfig, VllmConfig

from tests.options.refusal import ROLLING_REFUSED, refusal
from tests.tiny_models import CONFIGS, engine_args, engine_config, folder
from vllm_h2o.errors import ConfigError, UnsupportedError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.request import RefusedRequestError, check_request

TRAINED = 256
"""Of the tiny models."""
ROLLING = {"positions": "rolling", "prefill": "chunked", "budget": 64}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Llama."""
    return folder(tmp_path_factory.mktemp("models"), "LlamaForCausalLM")


def made(model: str, options: dict[str, Any], **settings: Any) -> VllmConfig:
    """An engine's config, with pages of 16."""
    asked = {"kv_policy": "h2o", "kv_policy_config": {**ROLLING, **options}}
    return engine_config(
        model, **{"block_size": 16, "max_num_batched_tokens": 128} | asked | settings
    )


@pytest.mark.parametrize("asked", [100, TRAINED, 4096, 4_194_304])
def test_sequences_of_any_length(llama: str, asked: int) -> None:
    """Longer than what the model was trained on, without an environment switch; twice alike."""
    args = engine_args(
        llama, kv_policy="h2o", kv_policy_config=ROLLING, max_model_len=asked, block_size=16,
        max_num_batched_tokens=128,
    )  # fmt: skip
    for config in (args.create_engine_config(), args.create_engine_config()):
        assert config.model_config.max_model_len == args.max_model_len == asked
        carried = KVPolicyConfig.of(config)
        assert carried is not None and carried.position_limit == TRAINED
    if asked > TRAINED:
        with pytest.raises(ValueError, match="is greater than the derived max_model_len"):
            engine_config(llama, max_model_len=asked, kv_policy="h2o")


def test_its_own_length(llama: str) -> None:
    """Where none is asked for, it is vLLM's; fewer positions may be, but not more."""
    assert made(llama, {}).model_config.max_model_len == TRAINED
    carried = KVPolicyConfig.of(made(llama, {"position_limit": 200}))
    assert carried is not None and carried.position_limit == 200
    with pytest.raises(ConfigError) as caught:
        made(llama, {"position_limit": TRAINED + 1}, max_model_len=4096)
    assert str(caught.value) == (
        "kv-policy: asked: position_limit=257; is: the model was trained on sequences of 256 "
        "tokens; why not: it does not know later positions; what to do: give at most 256, or leave "
        "it out."
    )


@pytest.mark.parametrize(
    ("options", "settings", "needed"),
    [
        ({"position_limit": 190}, {}, 191),
        ({"position_limit": 191}, {}, None),
        ({"position_limit": 64}, {"max_num_batched_tokens": 1, "max_num_seqs": 1}, 65),
        ({"position_limit": 65}, {"max_num_batched_tokens": 1, "max_num_seqs": 1}, None),
        ({"budget": 0.2}, {"max_model_len": 10_000}, 2127),
    ],
)
def test_room_for_a_step(
    llama: str, options: dict[str, Any], settings: dict[str, Any], needed: int | None
) -> None:
    """What is resident and a chunk, or the next token, have positions of their own."""
    if needed is None:
        assert made(llama, options, **settings)
        return
    with pytest.raises(ConfigError, match=f"that may be {needed} positions, and position_limit is"):
        made(llama, options, **settings)


def test_a_budget_of_a_request(llama: str) -> None:
    """Refused where it enters, as every budget is that cannot be used."""
    config = made(llama, {}, max_model_len=10_000)
    params = type("P", (), {"extra_args": {"kv_budget": 140}, "max_tokens": 900})()
    asked = {
        "sampling_params": params,
        "prompt_token_ids": [1, 2],
        "mm_features": None,
        "resumable": False,
    }
    request = type("R", (), asked)()
    with pytest.raises(RefusedRequestError, match="kv_budget=140 with positions='rolling'"):
        check_request(request, config)
    params.extra_args = {"kv_budget": 128}
    assert check_request(request, config) is request
    # A short one never needs so many positions.
    params.extra_args, params.max_tokens = {"kv_budget": "full"}, 200
    assert check_request(request, config) is request


def test_rows_that_vllm_can_count(llama: str) -> None:
    """Of all sequences together: its kernels have 32 bits for them."""
    assert made(llama, {}, max_model_len=1 << 25, max_num_seqs=63)
    with pytest.raises(ConfigError) as caught:
        made(llama, {}, max_model_len=1 << 25, max_num_seqs=64)
    assert caught.value.remedy == "give --max-num-seqs 63, or fewer tokens"


@pytest.mark.parametrize(
    ("options", "asked", "found"),
    [
        ({"position_limit": 99, "positions": "original"}, "position_limit=99", "positions='origi"),
        ({"prefill": "full"}, "positions='rolling'", "prefill='full' keeps a prompt whole"),
        ({"score": "combined"}, "positions='rolling'", "score='combined' has scoring passes"),
        ({"score": "second_pass"}, "positions='rolling'", "score='second_pass' has scoring"),
        ({"name": "h2o2"}, "positions='rolling'", "score='combined' has scoring passes"),
        ({"granularity": "block"}, "positions='rolling'", "granularity='block' leaves slots free"),
        ({"merge": 0.5}, "positions='rolling'", "merge=0.5 makes keys of several positions one"),
    ],
)
def test_what_does_not_go_with_it(options: dict[str, Any], asked: str, found: str) -> None:
    """In four parts."""
    message = refusal(**{**ROLLING, **options})
    assert message.startswith(f"kv-policy: asked: {asked}; is: {found}")
    assert message.endswith("what to do: leave it out, or change the other option.")
    assert "there is no such choice" in refusal(**{**ROLLING, "positions": "relative"})


DRAFTS, WINDOWS, NO_ROTATION, SEVERAL = ROLLING_REFUSED
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


@pytest.mark.parametrize(
    ("architecture", "options", "settings", "what"),
    [
        ("LlamaForCausalLM", {"evict_every": 4}, {"speculative_config": NGRAM}, DRAFTS),
        ("Gemma3ForCausalLM", {}, {"block_size": 32}, WINDOWS),
        ("SmolLM3ForCausalLM", {}, {}, NO_ROTATION),
    ],
)
def test_engines_that_are_refused(
    architecture: str,
    options: dict[str, Any],
    settings: dict[str, Any],
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where either alone is fine."""
    smollm3 = transformers.SmolLM3Config(
        **{**CONFIGS["LlamaForCausalLM"]().to_dict(), "model_type": "smollm3"},
        no_rope_layers=[0],
    )
    monkeypatch.setitem(CONFIGS, "SmolLM3ForCausalLM", lambda: smollm3)
    model = folder(tmp_path, architecture)
    with pytest.raises(UnsupportedError, match=f"the engine has {what}"):
        made(model, options, **settings)


def test_several_positions_of_a_token(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """M-RoPE, of models that see images too."""
    monkeypatch.setattr(ModelConfig, "uses_mrope", property(lambda _: True))
    with pytest.raises(UnsupportedError, match=re.escape(SEVERAL)):
        made(llama, {})
