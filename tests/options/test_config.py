"""The policy's configuration: what is taken, what is refused, and what is said then."""

from __future__ import annotations

import dataclasses
import json
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.options.refusal import refusal
from vllm_h2o.errors import ConfigError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.policy import POLICIES, Budget

EVICTING = [name for name, policy in POLICIES.items() if policy.evicts]
BUDGET_RULE = (
    "is: a budget is an int > 0 (slots), a float in (0, 1] (a fraction), or 'full'; "
    "why not: no number of slots follows from it; what to do: give e.g. 512 or 0.2."
)

ONE_SLOT = "; 1 is one slot, also from a client that writes 1.0 so: every token is 'full'."


@pytest.mark.parametrize(
    "budget", [0, 0.0, -3, -0.5, 1.5, 2.0, math.nan, math.inf, "abc", "", True, False, None, [1]]
)
def test_budget_refused(budget: Any) -> None:
    """What is neither a number of slots nor a fraction is named, with the rule and an example."""
    said = f"kv-policy: asked: budget={budget!r}; {BUDGET_RULE}"
    assert refusal(budget=budget) == said
    if isinstance(budget, str):
        assert refusal("h2o", {"budget": budget}) == said


@pytest.mark.parametrize("budget", [2, 512, 10**9, 1e-6, 0.2, 1.0])
def test_budget_taken(budget: float) -> None:
    """Any number of slots from the smallest possible, any fraction above nothing."""
    assert KVPolicyConfig(budget=budget).budget == budget


@pytest.mark.parametrize(
    ("options", "least", "num_sinks"),
    [
        ({"budget": 1}, 2, 0),
        ({"budget": 5, "num_sink_tokens": 4}, 6, 4),
        ({"budget": 4, "num_sink_tokens": 4, "recent_ratio": 0.0}, 5, 4),
        ({"budget": 5, "name": "streaming"}, 6, 4),
        ({"budget": 1, "name": "local"}, 2, 0),
        ({"budget": 5, "min_budget": 5, "num_sink_tokens": 4}, 6, 4),
    ],
)
def test_budget_too_small(options: dict[str, Any], least: int, num_sinks: int) -> None:
    """Sinks, one recent token if any and the next token have room, or it is said what they need."""
    assert refusal(**options) == (
        f"kv-policy: asked: budget={options['budget']!r}; is: that many slots; "
        f"why not: {num_sinks} first tokens, the recent window and the next token need {least}; "
        f"what to do: give a budget of at least {least}, or fewer sinks"
        + (ONE_SLOT if options["budget"] == 1 else ".")
    )
    assert KVPolicyConfig(**{**options, "budget": least}).budget == least
    assert KVPolicyConfig(**{**options, "min_budget": least}).min_budget == least


def test_fraction_too_small() -> None:
    """A fraction is judged when the length is known, with the slots that it comes to."""
    config = KVPolicyConfig(budget=0.01, num_sink_tokens=4)
    with pytest.raises(ConfigError) as caught:
        config.resolve(max_model_len=128, block_size=16)
    assert str(caught.value) == (
        "kv-policy: asked: budget=0.01; is: that is 2 slots of max_model_len=128; "
        "why not: 4 first tokens, the recent window and the next token need 6; "
        "what to do: give a budget of at least 6, or fewer sinks."
    )
    assert config.resolve(1024, 16).capacity == 16


@pytest.mark.parametrize(("policy", "suggestion"), [("h20", "h2o"), ("stream", "streaming")])
def test_unknown_policy(policy: str, suggestion: str) -> None:
    """A misspelt policy is met with the list and the nearest name."""
    expected = (
        f"kv-policy: asked: policy {policy!r}; is: the policies are h2o, h2o2, streaming, "
        "local, random, full; why not: there is no policy of that name; "
        f"what to do: did you mean {suggestion!r}?."
    )
    assert refusal(name=policy) == refusal(policy, None) == expected


@pytest.mark.parametrize("policy", ["quantised", "", 7, None, True, ("h2o",)])
def test_policy_like_no_other(policy: Any) -> None:
    """Nothing is suggested where nothing is near."""
    assert "what to do: choose one of them." in refusal(name=policy)


def test_unknown_key() -> None:
    """A misspelt key is met with the list and the nearest key, a strange one with other advice."""
    message = refusal("h2o", {"recent": 0.5})
    assert "asked: key 'recent' in the policy's configuration; is: the keys are name, bu" in message
    assert "why not: a key that nothing reads would be a silent no-op; " in message
    assert "what to do: did you mean 'recent_ratio'?." in message
    assert "what to do: remove it." in refusal("h2o", {"zzz": 1})
    assert "key 3 in" in refusal("h2o", {3: 1})


@pytest.mark.parametrize(
    "field",
    ["min_budget", "num_sink_tokens", "protect_prompt_tokens", "score_skip_recent", "seed"],
)
@pytest.mark.parametrize("value", [-1, 1.0, True, "many", 2**63])
def test_counts(field: str, value: Any) -> None:
    """Counts are whole numbers."""
    bits = 63 if field == "seed" else 31
    assert refusal(**{field: value}) == (
        f"kv-policy: asked: {field}={value!r}; is: {field} is a whole number of at most {bits} "
        f"bits; why not: it counts things, or seeds them; "
        f"what to do: give an int in [0, 2**{bits})."
    )


@pytest.mark.parametrize("ratio", [-0.1, 1.1, math.nan, True, "half", [0.5]])
def test_fractions(ratio: Any) -> None:
    """A fraction is a number from nothing to all."""
    assert "is: a fraction of the pool is a number in [0, 1]" in refusal(pressure_watermark=ratio)
    assert refusal(recent_ratio=ratio) == (
        f"kv-policy: asked: recent_ratio={ratio!r}; is: a fraction of the budget is a number in "
        "[0, 1]; why not: there is no such fraction; "
        "what to do: give a number in [0, 1]; the default is 0.5; h2o2 0.3."
    )
    assert refusal(merge=ratio).startswith(
        f"kv-policy: asked: merge={ratio!r}; is: a fraction of 1, the cosine of equal keys, is a "
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [("budget=0.2", "not JSON ("), ("{'budget': 0.2}", "not JSON ("), ("", "not JSON (")],
)
def test_not_json(text: str, what: str) -> None:
    """Text that is not JSON is shown, with the parser's complaint and an example."""
    message = refusal("h2o", text)
    assert message.startswith(f"kv-policy: asked: kv_policy_config={text!r}; is: {what}")
    assert "; why not: options are a JSON object; " in message
    assert message.endswith("""what to do: give e.g. '{"budget": 0.2}'.""")


@pytest.mark.parametrize(("options", "kind"), [("[1]", "list"), ("3", "int"), (0.2, "float")])
def test_not_a_mapping(options: Any, kind: str) -> None:
    """Values without names are refused."""
    message = refusal("h2o", options)
    assert f"is: a {kind}; why not: options are a mapping of field names to values;" in message


def test_name_given_twice() -> None:
    """The same name twice is fine, two names are not."""
    assert KVPolicyConfig.from_options("local", {"name": "local"}).name == "local"
    assert refusal("h2o", '{"name": "local"}') == (
        "kv-policy: asked: kv_policy='h2o' and name='local'; is: two different policies; "
        "why not: an engine runs one policy; what to do: name the policy once."
    )


def test_numerals_from_a_command_line() -> None:
    """``--kv-policy-config.budget 0.2`` may arrive as text; 1 is a slot, 1.0 is everything."""
    options = {"budget": "0.5", "seed": "7", "recent_ratio": "1"}
    config = KVPolicyConfig.from_options("random", options)
    assert (config.budget, config.seed, config.recent_ratio) == (0.5, 7, 1)
    assert KVPolicyConfig.from_options("h2o", {"budget": "64"}).resolve(1024, 16).capacity == 64
    assert KVPolicyConfig.from_options("h2o", {"budget": "1.0"}).resolve(1024, 16).capacity == 1024


def test_from_additional_config() -> None:
    """A name, a mapping or JSON's forms of them; nothing where there is no policy."""
    read = KVPolicyConfig.from_additional_config
    for nothing in (None, {}, {"other": 1}, {"kv_policy": None}, object()):
        assert read(nothing) is None
    assert read({"kv_policy": "local", "other": 1}) == KVPolicyConfig("local")
    assert read({"kv_policy": {"budget": 64}}) == KVPolicyConfig("h2o", 64)
    with pytest.raises(ConfigError, match="silent no-op"):
        read({"kv_policy": {"budgets": 64}})
    with pytest.raises(ConfigError, match="neither a policy nor an option; .* name one"):
        read({"kv_policy": {}})


def configured(name: str, **options: Any) -> KVPolicyConfig:
    """A config with those of the options that the policy reads."""
    read = POLICIES[name].options
    return KVPolicyConfig(name, **{key: options[key] for key in options if key in read})


configs = st.builds(
    configured,
    name=st.sampled_from(EVICTING),
    budget=st.one_of(st.integers(20, 10**6), st.floats(1e-6, 1.0)),
    min_budget=st.integers(0, 4096),
    recent_ratio=st.floats(0, 1),
    num_sink_tokens=st.one_of(st.none(), st.integers(0, 8)),
    seed=st.integers(0, 2**31),
)


@given(configs)
def test_round_trip(config: KVPolicyConfig) -> None:
    """What one process writes into ``additional_config``, another reads, with JSON in between."""
    carried = json.loads(json.dumps({"kv_policy": config.to_dict()}))
    assert KVPolicyConfig.from_additional_config(carried) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.budget = 1  # type: ignore[misc]


@given(configs, st.integers(1, 1 << 20), st.sampled_from([1, 8, 16, 32, 128]))
def test_resolve(config: KVPolicyConfig, max_model_len: int, block_size: int) -> None:
    """Whole pages, not one more than the slots need, and never more than a longest sequence."""
    if config.min_budget > max_model_len:
        with pytest.raises(ConfigError, match="every sequence would be kept whole"):
            config.resolve(max_model_len, block_size)
        return
    wanted: Any = config.budget
    if isinstance(wanted, float):
        wanted = math.ceil(Fraction(str(wanted)) * max_model_len)
    slots = min(max(wanted, config.min_budget), max_model_len)
    least = config.num_sinks + (config.effective_recent_ratio > 0) + 1
    if slots < least:
        with pytest.raises(ConfigError, match=f"that is {slots} slots"):
            config.resolve(max_model_len, block_size)
        return
    budget = config.resolve(max_model_len, block_size)
    assert budget.capacity % block_size == 0
    assert slots <= budget.capacity < slots + block_size
    assert budget.num_sinks == config.num_sinks
    assert config.policy.keeps_heavy or budget.num_heavy == 0


@pytest.mark.parametrize(
    ("fraction", "length", "capacity"),
    [(0.07, 1600, 112), (0.29, 1600, 464), (0.2, 8192, 1648), (0.25, 4096, 1024), (1.0, 100, 112)],
)
def test_a_fraction_is_taken_as_written(fraction: float, length: int, capacity: int) -> None:
    """0.07 of 1600 is 112, seven pages of 16, although the floating-point product is above it."""
    assert KVPolicyConfig(budget=fraction).resolve(length, 16).capacity == capacity


def test_min_budget() -> None:
    """It lifts what a fraction comes to; what no sequence can use is refused."""
    config = KVPolicyConfig(budget=0.1, min_budget=256)
    assert config.resolve(1024, 16).capacity == 256
    assert config.resolve(8192, 16).capacity == 832
    assert config.resolve(256, 16).capacity == 256
    with pytest.raises(ConfigError) as caught:
        config.resolve(255, 16)
    assert str(caught.value) == (
        "kv-policy: asked: min_budget=256; is: max_model_len=255 is the longest sequence; why not: "
        "every sequence would be kept whole; "
        "what to do: give a min_budget that is shorter, or leave it out."
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"name": "h2o"}, Budget(64, 31, 32, 0)),
        ({"name": "h2o", "num_sink_tokens": 4}, Budget(64, 29, 30, 4)),
        ({"name": "random", "recent_ratio": 0.25}, Budget(64, 47, 16, 0)),
        ({"name": "local"}, Budget(64, 0, 63, 0)),
        ({"name": "streaming"}, Budget(64, 0, 59, 4)),
        ({"name": "streaming", "num_sink_tokens": 0}, Budget(64, 0, 63, 0)),
    ],
)
def test_each_policy(options: dict[str, Any], expected: Budget) -> None:
    """Who keeps heavy hitters, who has sinks when nobody asks for them."""
    assert KVPolicyConfig(budget=64, **options).resolve(1024, 16) == expected


@pytest.mark.parametrize("budget", [{}, {"budget": 1.0}, {"budget": "1.0"}])
def test_full(budget: dict[str, Any]) -> None:
    """``full`` has room for a longest sequence, in whole pages."""
    config = KVPolicyConfig.from_options("full", budget)
    assert config.resolve(1024, 16) == Budget(1024, 0, 1023, 0)
    assert config.resolve(1000, 16).capacity == 1008


@pytest.mark.parametrize("budget", [1, 512, 0.5])
def test_full_takes_no_budget(budget: float) -> None:
    """A budget that would be ignored is refused."""
    assert refusal(name="full", budget=budget) == (
        f"kv-policy: asked: budget={budget!r} with policy 'full'; is: 'full' keeps every token; "
        "why not: a budget would be ignored; "
        "what to do: leave the budget out, or choose another policy."
    )


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("full", "min_budget", 64),
        ("full", "num_sink_tokens", 4),
        ("full", "eviction", "pressure"),
        ("local", "recent_ratio", 0.3),
        ("streaming", "recent_ratio", 0.3),
        ("h2o", "seed", 3),
    ],
)
def test_an_option_that_the_policy_does_not_read(name: str, field: str, value: Any) -> None:
    """It would be a silent no-op."""
    message = refusal(name=name, **{field: value})
    assert message.startswith(f"kv-policy: asked: {field}={value!r} with policy '{name}'; is: ")
    assert "silent no-op" in message


@pytest.mark.parametrize(
    "key", ["kv-policy", "KV_POLICY", "kv_policy_config", "kvpolicy", "kv_polciy"]
)
def test_a_near_miss_in_additional_config(key: str) -> None:
    """A policy under another key would stay off without a word."""
    with pytest.raises(ConfigError, match="read from 'kv_policy' alone"):
        KVPolicyConfig.from_additional_config({key: {"name": "h2o"}})
    assert KVPolicyConfig.from_additional_config({"something_else": 1}) is None
