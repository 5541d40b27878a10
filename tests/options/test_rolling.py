# SPDX-License-Identifier: Apache-2.0
"""Rolling positions on real engine configs: their limit, and the length of sequences."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import VllmConfig

from tests.tiny_models import engine_args, engine_config, folder
from vllm_h2o.errors import ConfigError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.request import RefusedRequestError, check_request

TRAINED = 256
"""Trained length of the tiny models."""
ROLLING = {"positions": "rolling", "eviction": "chunk", "budget": 64}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Llama."""
    return folder(tmp_path_factory.mktemp("models"), "LlamaForCausalLM")


def made(model: str, options: dict[str, Any], **settings: Any) -> VllmConfig:
    """Return an engine's config, with pages of 16."""
    asked = {"kv_policy": "h2o", "kv_policy_config": {**ROLLING, **options}}
    return engine_config(
        model, **{"block_size": 16, "max_num_batched_tokens": 128} | asked | settings
    )


@pytest.mark.parametrize("asked", [100, TRAINED, 4_194_304])
def test_rolling_takes_sequences_of_any_length(llama: str, asked: int) -> None:
    """Longer than the trained length, without an environment switch; twice alike."""
    args = engine_args(
        llama, kv_policy="h2o", kv_policy_config=ROLLING, max_model_len=asked, block_size=16,
        max_num_batched_tokens=128,
    )  # fmt: skip
    for config in (args.create_engine_config(), args.create_engine_config()):
        assert config.model_config.max_model_len == args.max_model_len == asked
        carried = KVPolicyConfig.of(config)
        assert carried is not None and carried.positions == TRAINED
    if asked > TRAINED:
        with pytest.raises(ValueError, match="is greater than the derived max_model_len"):
            engine_config(llama, max_model_len=asked, kv_policy="h2o")


def test_rolling_below_a_number_carries_it(llama: str) -> None:
    """The number is at most the trained length, which is the default."""
    assert made(llama, {}).model_config.max_model_len == TRAINED
    carried = KVPolicyConfig.of(made(llama, {"positions": 200}))
    assert carried is not None and carried.position_limit == 200
    with pytest.raises(ConfigError) as caught:
        made(llama, {"positions": TRAINED + 1}, max_model_len=4096)
    assert str(caught.value) == (
        "kv-policy: positions=257 is not supported: the model was trained on sequences of 256 "
        "tokens. It does not know later positions. Give at most 256, or rolling."
    )


@pytest.mark.parametrize(
    ("options", "settings", "needed"),
    [
        ({"positions": 190}, {}, 191),
        ({"positions": 191}, {}, None),
        ({"positions": 64}, {"max_num_batched_tokens": 1, "max_num_seqs": 1}, 65),
        ({"positions": 65}, {"max_num_batched_tokens": 1, "max_num_seqs": 1}, None),
        ({"budget": 0.2}, {"max_model_len": 10_000}, 2127),
        ({"positions": 190, "evict_every": "page"}, {}, 191),
        ({"positions": 191, "evict_every": "page"}, {}, None),
    ],
)
def test_rolling_needs_positions_for_a_step(
    llama: str, options: dict[str, Any], settings: dict[str, Any], needed: int | None
) -> None:
    """Resident tokens and a chunk, or the next token, have positions of their own."""
    if needed is None:
        assert made(llama, options, **settings)
        return
    with pytest.raises(ConfigError, match=f"need {needed} positions. Positions roll below"):
        made(llama, options, **settings)


def test_rolling_refuses_a_request_that_needs_more_positions(llama: str) -> None:
    """The front end refuses it."""
    config = made(llama, {}, max_model_len=10_000)
    params = type("P", (), {"extra_args": {"kv_budget": 140}, "max_tokens": 900})()
    asked = {
        "sampling_params": params,
        "prompt_token_ids": [1, 2],
        "mm_features": None,
        "resumable": False,
    }
    request = type("R", (), asked)()
    with pytest.raises(RefusedRequestError, match="kv_budget=140 with positions=256"):
        check_request(request, config)
    params.extra_args = {"kv_budget": 128}
    assert check_request(request, config) is request
    # A short one never needs that many positions.
    params.extra_args, params.max_tokens = {"kv_budget": "full"}, 200
    assert check_request(request, config) is request


def test_rolling_refuses_more_tokens_than_int32(llama: str) -> None:
    """vLLM's kernels index the tokens of all sequences with 32 bits."""
    assert made(llama, {}, max_model_len=1 << 25, max_num_seqs=63)
    with pytest.raises(ConfigError) as caught:
        made(llama, {}, max_model_len=1 << 25, max_num_seqs=64)
    assert caught.value.remedy == "give --max-num-seqs 63, or a smaller --max-model-len"
