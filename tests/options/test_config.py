# SPDX-License-Identifier: Apache-2.0
"""The policy's configuration: where it is read, and the slots that a budget comes to."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.options.refusal import refusal
from vllm_h2o.errors import ConfigError, IntegrityError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.policy import Budget, policies
from vllm_h2o.policy.budget import minimum_slots

EVICTING = [name for name, policy in policies().items() if policy.evicts]
RANKING = [name for name, policy in policies().items() if policy.keeps_heavy]


@pytest.mark.parametrize(
    ("options", "least", "sinks"),
    [
        ({"budget": 1}, 2, 0),
        ({"budget": 5, "num_sink_tokens": 4}, 6, 4),
        ({"budget": 4, "num_sink_tokens": 4, "recent_ratio": 0.0}, 5, 4),
        ({"budget": 5, "name": "streaming"}, 6, 4),
        ({"budget": 1, "name": "local"}, 2, 0),
        ({"budget": 5, "min_budget": 5, "num_sink_tokens": 4}, 6, 4),
    ],
)
def test_budget_too_small_is_refused(options: dict[str, Any], least: int, sinks: int) -> None:
    """Sinks, a recent token if any and the next token need slots."""
    slots = options["budget"]
    whole = "; budget=1 is one token, and full is every token" if slots == 1 else ""
    assert refusal(**options) == (
        f"kv-policy: budget={slots} is not supported: it is {slots} slot{'s' * (slots != 1)}. "
        f"{sinks} sinks, the recent window and the next token need {least} slots. "
        f"Give a budget of at least {least} tokens, or fewer sinks{whole}."
    )
    assert KVPolicyConfig(**{**options, "budget": least}).budget == least
    assert KVPolicyConfig(**{**options, "min_budget": least}).min_budget == least


def test_fraction_too_small_is_refused_once_the_length_is_known() -> None:
    """The message has the slots that it comes to."""
    config = KVPolicyConfig(budget=0.01, num_sink_tokens=4)
    with pytest.raises(ConfigError) as caught:
        config.check(max_model_len=128, block_size=16)
    assert str(caught.value) == (
        "kv-policy: budget=0.01 is not supported: it is 2 slots of max_model_len=128. "
        "4 sinks, the recent window and the next token need 6 slots. "
        "Give a larger --max-model-len, a budget of at least 6 tokens, or fewer sinks."
    )
    config.check(1024, 16)
    assert config.resolve(1024, 16).capacity == 16
    # Counted all the same: vLLM tries lengths that nobody wants.
    assert [config.resolve(length, 16).capacity for length in (1, 128)] == [16, 16]


@pytest.mark.parametrize(("ratio", "sinks", "least"), [(0.5, 0, 32), (0.0, 0, 32), (0.5, 20, 64)])
def test_budget_of_pages_has_room_for_the_next_page(ratio: float, sinks: int, least: int) -> None:
    """Sinks, a recent token and the next tokens take whole pages; one page stays in any case."""
    options = {"evict_every": "page", "recent_ratio": ratio, "num_sink_tokens": sinks}
    assert KVPolicyConfig(budget=least, **options).resolve(1024, 16).capacity == least
    assert KVPolicyConfig(budget=least - 15, **options).resolve(1024, 16).capacity == least
    if least > 32:
        with pytest.raises(ConfigError, match=f"need {least} slots in pages of 16"):
            KVPolicyConfig(budget=least - 16, **options).check(1024, 16)


def test_from_options_refuses_two_names() -> None:
    """The same name twice is one."""
    assert KVPolicyConfig.from_options("local", {"name": "local"}).name == "local"
    assert refusal("h2o", '{"name": "local"}') == (
        "kv-policy: kv_policy='h2o' with name='local' is not supported: these are two policies. "
        "An engine runs one policy. Name the policy once."
    )


def test_from_options_reads_numerals() -> None:
    """``--kv-policy-config.budget 0.2`` may arrive as text; 1 is a slot, 1.0 is everything."""
    config = KVPolicyConfig.from_options("h2o", {"budget": "0.5", "recent_ratio": "1"})
    assert (config.budget, config.recent_ratio) == (0.5, 1)
    assert KVPolicyConfig.from_options("h2o", {"budget": "64"}).resolve(1024, 16).capacity == 64
    assert KVPolicyConfig.from_options("h2o", {"budget": "1.0"}).resolve(1024, 16).capacity == 1024


def test_from_additional_config_reads_every_form() -> None:
    """A name or a mapping; nothing where there is no policy."""
    read = KVPolicyConfig.from_additional_config
    for nothing in (None, {}, {"other": 1}, {"kv_policy": None}, object()):
        assert read(nothing) is None
    assert read({"kv_policy": "local", "other": 1}) == KVPolicyConfig("local")
    assert read({"kv_policy": {"budget": 64}}) == KVPolicyConfig("h2o", 64)
    with pytest.raises(ConfigError, match="option 'budgets'"):
        read({"kv_policy": {"budgets": 64}})
    with pytest.raises(ConfigError, match="it names no policy and no option"):
        read({"kv_policy": {}})


@pytest.mark.parametrize(
    "key", ["kv-policy", "KV_POLICY", "kv_policy_config", "kvpolicy", "kv_polciy"]
)
def test_from_additional_config_refuses_a_near_miss(key: str) -> None:
    """A policy under another key would be ignored."""
    with pytest.raises(ConfigError, match="the key of a policy is 'kv_policy'"):
        KVPolicyConfig.from_additional_config({key: {"name": "h2o"}})


def test_of_returns_one_object_per_process() -> None:
    """Options are parsed and checked once; a part of the engine needs a policy."""
    carried = SimpleNamespace(additional_config={"kv_policy": KVPolicyConfig("h2o2").to_dict()})
    assert KVPolicyConfig.of(carried) is KVPolicyConfig.of(carried)
    assert KVPolicyConfig.required(carried) == KVPolicyConfig("h2o2")
    with pytest.raises(IntegrityError):
        KVPolicyConfig.required(SimpleNamespace(additional_config={}))


configs = st.builds(
    KVPolicyConfig,
    name=st.sampled_from(RANKING),
    budget=st.one_of(st.integers(20, 10**6), st.floats(1e-6, 1.0)),
    min_budget=st.integers(0, 4096),
    recent_ratio=st.floats(0, 1),
    num_sink_tokens=st.one_of(st.none(), st.integers(0, 8)),
    evict_every=st.sampled_from([1, "page"]),
)


@given(configs)
def test_config_survives_json(config: KVPolicyConfig) -> None:
    """Another process reads what one writes into ``additional_config``."""
    carried = json.loads(json.dumps({"kv_policy": config.to_dict()}))
    assert KVPolicyConfig.from_additional_config(carried) == config
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.budget = 1  # type: ignore[misc]


@given(configs, st.integers(1, 5000), st.integers(0, 5000), st.sampled_from([1, 16, 128]))
def test_resolve_of_a_longer_sequence_is_no_smaller(
    config: KVPolicyConfig, length: int, more: int, block_size: int
) -> None:
    """vLLM looks for the longest sequence that fits by halves."""
    shorter, longer = (config.resolve(size, block_size) for size in (length, length + more))
    assert shorter.capacity <= longer.capacity
    for chunk in (1, 256):
        assert shorter.most_slots(chunk) <= longer.most_slots(chunk)


@given(configs, st.integers(1, 1 << 20), st.sampled_from([1, 8, 16, 32, 128]))
def test_resolve_rounds_up_to_whole_pages(
    config: KVPolicyConfig, max_model_len: int, block_size: int
) -> None:
    """No page more than the slots need, and no more than a longest sequence."""
    if config.min_budget > max_model_len:
        with pytest.raises(ConfigError, match="Every sequence would be kept whole"):
            config.check(max_model_len, block_size)
        assert config.resolve(max_model_len, block_size)
        return
    wanted: Any = config.budget
    if isinstance(wanted, float):
        wanted = math.ceil(Fraction(str(wanted)) * max_model_len)
    slots = min(max(wanted, config.min_budget), max_model_len)
    ratio, schedule = config.effective_recent_ratio, config.schedule
    least = minimum_slots(ratio, config.num_sinks, schedule, block_size)
    have = -(-slots // block_size) * block_size if schedule.by_page else slots
    if have < least:
        with pytest.raises(ConfigError, match=f"it is {slots} slot"):
            config.check(max_model_len, block_size)
        lifted = config.resolve(max_model_len, block_size)
        assert lifted.capacity == -(-least // block_size) * block_size
        return
    config.check(max_model_len, block_size)
    budget = config.resolve(max_model_len, block_size)
    assert budget.capacity % block_size == 0
    assert slots <= budget.capacity < slots + block_size
    assert budget.num_sinks == config.num_sinks


@pytest.mark.parametrize(
    ("fraction", "length", "capacity"),
    [(0.07, 1600, 112), (0.29, 1600, 464), (0.2, 8192, 1648), (0.25, 4096, 1024), (1.0, 100, 112)],
)
def test_resolve_takes_a_fraction_as_written(fraction: float, length: int, capacity: int) -> None:
    """0.07 of 1600 is 112, seven pages of 16, although the floating-point product is above it."""
    assert KVPolicyConfig(budget=fraction).resolve(length, 16).capacity == capacity


def test_resolve_lifts_to_min_budget() -> None:
    """A min_budget that no sequence can use is refused."""
    config = KVPolicyConfig(budget=0.1, min_budget=256)
    assert config.resolve(1024, 16).capacity == 256
    assert config.resolve(8192, 16).capacity == 832
    assert config.resolve(256, 16).capacity == 256
    with pytest.raises(ConfigError) as caught:
        config.check(255, 16)
    assert str(caught.value) == (
        "kv-policy: min_budget=256 is not supported: max_model_len=255 is the longest sequence. "
        "Every sequence would be kept whole. Give a smaller min_budget, or leave it out."
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"name": "h2o"}, Budget(64, 31, 32, 0)),
        ({"name": "h2o", "num_sink_tokens": 4}, Budget(64, 29, 30, 4)),
        ({"name": "snapkv", "recent_ratio": 0.25}, Budget(64, 47, 16, 0)),
        ({"name": "local"}, Budget(64, 0, 63, 0)),
        ({"name": "streaming"}, Budget(64, 0, 59, 4)),
        ({"name": "streaming", "num_sink_tokens": 0}, Budget(64, 0, 63, 0)),
        ({"name": "h2o", "evict_every": 8}, Budget(71, 31, 32, 0, 8)),
        ({"name": "h2o", "evict_every": "page"}, Budget(64, 24, 24, 0, 16, 16)),
    ],
)
def test_resolve_divides_by_policy(options: dict[str, Any], expected: Budget) -> None:
    """Heavy hitters, sinks and slots for the next tokens."""
    assert KVPolicyConfig(budget=64, **options).resolve(1024, 16) == expected


@pytest.mark.parametrize(
    ("options", "prompt_len", "max_tokens", "expected"),
    [
        ({"budget": 0.25, "budget_basis": "prompt"}, 100, 500, Budget(32, 15, 16, 0)),
        ({"budget": 0.25, "budget_basis": "request"}, 100, 156, Budget(64, 31, 32, 0)),
        ({"budget": 0.5, "budget_basis": "request"}, 900, 900, Budget(256, 127, 128, 0)),
        ({"budget": 0.1, "budget_basis": "prompt", "min_budget": 48}, 9, 9, Budget(48, 23, 24, 0)),
        (
            {"budget": 0.1, "budget_basis": "prompt", "num_sink_tokens": 20},
            9,
            9,
            Budget(32, 5, 6, 20),
        ),
        (
            {"budget": 0.1, "budget_basis": "prompt", "evict_every": "page"},
            9,
            9,
            Budget(32, 8, 8, 0, 16, 16),
        ),
        ({"budget": 0.25}, 100, 500, None),
    ],
)
def test_resolve_request_by_its_own_lengths(
    options: dict[str, Any], prompt_len: int, max_tokens: int, expected: Budget | None
) -> None:
    """Fractions of prompts and requests in whole pages, with room for sinks and a next token."""
    config = KVPolicyConfig(**options)
    assert config.resolve_request(512, 16, prompt_len, max_tokens) == expected


def test_resolve_request_evicts_several_tokens_at_a_time() -> None:
    """Their slots come on top, up to the longest sequence."""
    config = KVPolicyConfig(budget=64, evict_every=8)
    assert config.resolve_request(512, 16, 9, 9, 100) == Budget(119, 55, 56, 0, 8)
    assert config.resolve_request(512, 16, 9, 9, "full") == Budget(512, 255, 256, 0)


@pytest.mark.parametrize(
    ("options", "max_budget", "fits"),
    [
        ({"budget": 512}, 128, False),
        ({"budget": 512}, 512, True),
        ({"budget": 0.5}, 0.2, False),
        ({"budget": 0.2}, 205, True),
        ({"budget": 0.2}, 204, False),
        ({"budget": "full"}, 1.0, True),
        ({"budget": "full"}, 0.9, False),
        ({"budget": 0.5, "budget_basis": "prompt"}, 128, False),
        ({"budget": 64, "min_budget": 256}, 128, True),
    ],
)
def test_resolve_refuses_budget_above_max_budget(
    options: dict[str, Any], max_budget: Any, fits: bool
) -> None:
    """The engine's own budget is one that a request may ask for."""
    config = KVPolicyConfig(**options, max_budget=max_budget)
    if fits:
        config.check(1024, 16)
        return
    with pytest.raises(ConfigError, match=f"slots .*max_budget={max_budget!r} is .* for at most"):
        config.check(1024, 16)


@pytest.mark.parametrize("name", EVICTING)
def test_config_of_every_policy_resolves(name: str) -> None:
    """By page, too: it goes with every ranking."""
    assert KVPolicyConfig(name).resolve(1024, 16).evict_every == 1
    assert KVPolicyConfig(name, evict_every="page").resolve(1024, 16).unit == 16
