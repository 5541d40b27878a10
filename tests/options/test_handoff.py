# SPDX-License-Identifier: Apache-2.0
"""What ``kv_transfer_params`` come to in ``extra_args``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_h2o.errors import ConfigError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.handoff import Handoff, digest, read_params

CONFIG = KVPolicyConfig(name="h2o", continuation="/kept")
GRAMMAR = StructuredOutputsParams(choice=["a"])
GIVEN = Handoff([7], "this", digest([1, 2, 3])).params(CONFIG)


def read(
    given: Any, config: KVPolicyConfig | None = CONFIG, others: tuple[str, ...] = (), **asked: Any
) -> dict[str, Any]:
    """What a request of three tokens comes to, of a model with ten."""
    params = SamplingParams(**asked, extra_args={"kv_transfer_params": given, "kv_budget": 64})
    request = SimpleNamespace(sampling_params=params, prompt_token_ids=[1, 2, 3])
    return read_params(request, config, 10, others)


def test_both_servers_read_their_part() -> None:
    """And neither leaves vLLM's key, for which it would miss a KV connector."""
    assert read({"do_remote_decode": True}) == {"kv_budget": 64, "kv_send": True}
    taken = {"token_ids": [7], "made_by": "this", "prompt": digest([1, 2, 3])}
    assert read(GIVEN) == {"kv_budget": 64, "kv_take": taken}
    for nothing in (None, {}, {"do_remote_decode": False, "do_remote_prefill": False}):
        assert read(nothing) == {"kv_budget": 64}


def test_parameters_of_a_connector_stay_without_a_policy() -> None:
    """This package reads its own alone."""
    given = {"do_remote_prefill": True, "remote_block_ids": [1]}
    assert read(given, None) == {"kv_transfer_params": given, "kv_budget": 64}
    with pytest.raises(ConfigError, match="this one has none"):
        read(GIVEN, None)
    with pytest.raises(ConfigError, match="the first server has no kv-policy"):
        read(given)


@pytest.mark.parametrize(
    ("asked", "others", "what"),
    [
        ({"structured_outputs": GRAMMAR}, (), "a grammar"),
        ({"n": 2, "temperature": 1}, (), "several answers"),
        ({"logprobs": 0}, (), "log-probabilities"),
        ({}, ("images", "a LoRA adapter"), "images and a LoRA adapter"),
    ],
)
def test_what_two_servers_cannot_share(
    asked: dict[str, Any], others: tuple[str, ...], what: str
) -> None:
    """The first server hands nothing over; the second cannot have been given anything."""
    assert read({"do_remote_decode": True}, CONFIG, others, **asked) == {"kv_budget": 64}
    with pytest.raises(ConfigError, match=f"the request has {what}"):
        read(GIVEN, CONFIG, others, **asked)


def test_all_options_are_compared_but_the_folder() -> None:
    """Each server may see it in another place."""
    assert read(GIVEN, KVPolicyConfig(name="h2o", continuation="/elsewhere"))["kv_take"]
    options = CONFIG.of_caches
    assert options["budget"] == CONFIG.budget and "continuation" not in options
    other = KVPolicyConfig(name="h2o", continuation="/kept", num_sink_tokens=2)
    with pytest.raises(ConfigError, match="num_sink_tokens is not given there and 2 here"):
        read(GIVEN, other)
