"""Options of scores, prompts and requests: what they come to, and what does not go together."""

from __future__ import annotations

from typing import Any

import pytest

from tests.options.refusal import refusal
from vllm_h2o.errors import ConfigError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.policy import Budget, SecondPass


@pytest.mark.parametrize(
    ("field", "works"),
    [
        ("budget_basis", "max_model_len, prompt, request"),
        ("granularity", "token, block"),
        ("prefill", "full, window, chunked"),
        ("eviction", "always, pressure"),
        ("score", "sum, sum_squares, mean, mean_squares, second_pass, combined, reconstruction"),
    ],
)
def test_choices_that_all_work(field: str, works: str) -> None:
    """Each is taken; another is met with the list."""
    for value in works.split(", "):
        assert getattr(KVPolicyConfig(**{field: value}), field) == value
    assert f"is: what works is {works}; why not: there is no" in refusal(**{field: "nonsense"})


@pytest.mark.parametrize(
    ("options", "asked", "found"),
    [
        (
            {"budget": 64, "budget_basis": "prompt"},
            "budget_basis='prompt'",
            "budget=64 is a number of slots, a fraction of nothing",
        ),
        (
            {"name": "local", "prefill": "window"},
            "prefill='window' with policy 'local'",
            "'local' does not rank tokens by attention",
        ),
        (
            {"observation_window": 16},
            "observation_window=16",
            "prefill='full' with score='sum' lets every query of a prompt score",
        ),
        (
            {"window_score": "sum"},
            "window_score='sum'",
            "prefill='full' adds up what every query of a prompt gives",
        ),
        (
            {"prefill": "window", "observation_window": 0},
            "observation_window=0",
            "no query scores",
        ),
        (
            {"prefill": "window", "score": "mean"},
            "prefill='window' with score='mean'",
            "a mean counts every query of the prompt, and only the last ones score",
        ),
        (
            {"granularity": "block", "score": "mean"},
            "granularity='block' with score='mean'",
            "means are ranked token by token",
        ),
        (
            {"granularity": "block", "budget_basis": "prompt"},
            "granularity='block' with budget_basis='prompt'",
            "the pages of a short request may all be recent",
        ),
        (
            {"granularity": "block", "evict_every": 4},
            "granularity='block' with evict_every=4",
            "a page is evicted at a time already, for as many tokens as it has slots",
        ),
        (
            {"split": True, "evict_every": 4},
            "split=true",
            "evict_every=4 packs again and again",
        ),
        (
            {"eviction": "pressure", "prefill": "chunked"},
            "eviction='pressure' with prefill='chunked'",
            "each chunk of a prompt is cut to the budget",
        ),
        (
            {"pressure_watermark": 0.1},
            "pressure_watermark=0.1",
            "eviction='always' does not ask how much is free",
        ),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], asked: str, found: str) -> None:
    """Each alone is fine, together one would be ignored."""
    message = refusal(**options)
    assert message.startswith(f"kv-policy: asked: {asked}; is: {found}; why not: ")
    assert message.endswith("what to do: leave it out, or change the other option.")


def test_evict_every() -> None:
    """At least one token; `h2o2` does without shared slots; no policy without eviction reads it."""
    assert refusal(evict_every=0) == (
        "kv-policy: asked: evict_every=0; is: so many tokens are evicted at a time; why not: a "
        "full sequence would never have room for its next token; what to do: give 1, which evicts "
        "a token with each new one, or more."
    )
    assert "a whole number of at most 31 bits" in refusal(evict_every=1.5)
    assert "'full' reads no options" in refusal(name="full", evict_every=2)
    assert not KVPolicyConfig("h2o2", evict_every=2).splits
    config = KVPolicyConfig(budget=64, evict_every=8)
    assert config.resolve(512, 16) == Budget(71, 31, 32, 0, 8)
    assert config.resolve_request(512, 16, 9, 9, 100) == Budget(119, 55, 56, 0, 8)
    assert config.resolve_request(512, 16, 9, 9, "full") == Budget(512, 255, 256, 0)


@pytest.mark.parametrize(
    ("options", "by_maximum"),
    [
        ({}, False),
        ({"prefill": "chunked"}, False),
        ({"prefill": "window"}, True),
        ({"prefill": "window", "window_score": "max"}, True),
        ({"prefill": "window", "window_score": "sum"}, False),
        ({"prefill": "window", "score": "sum_squares"}, True),
    ],
)
def test_window_scores(options: dict[str, Any], by_maximum: bool) -> None:
    """A window scores by maximum unless sums are asked for, and nothing else does."""
    assert KVPolicyConfig(**options).scores_by_maximum is by_maximum


@pytest.mark.parametrize(
    ("options", "power", "by_age"),
    [
        ({}, 1, False),
        ({"score": "sum_squares"}, 2, False),
        ({"score": "mean"}, 1, True),
        ({"score": "mean_squares"}, 2, True),
        ({"name": "h2o2"}, 2, True),
        ({"name": "random"}, 0, False),
    ],
)
def test_scores(options: dict[str, Any], power: int, by_age: bool) -> None:
    """Each policy has a score of its own, which an option of `h2o` replaces."""
    config = KVPolicyConfig(**options)
    assert (config.score_power, config.ranking.by_age) == (power, by_age)
    whole = config.name == "h2o2"
    assert config.ranking.window == whole
    assert config.ranking.second_pass is (SecondPass.LARGEST if whole else None)


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
        ({"budget": 64, "protect_prompt_tokens": 40}, 10, 99, Budget(64, 26, 27, 10)),
        ({"budget": 64, "protect_prompt_tokens": 40}, 40, 99, None),
        ({"budget": 64, "protect_prompt_tokens": 3, "num_sink_tokens": 4}, 2, 9, None),
        ({"budget": 0.25}, 100, 500, None),
    ],
)
def test_a_request_of_its_own(
    options: dict[str, Any], prompt_len: int, max_tokens: int, expected: Budget | None
) -> None:
    """Shares of prompts and requests in whole pages; never too few for sinks and a next token."""
    config = KVPolicyConfig(**options)
    assert config.resolve_request(512, 16, prompt_len, max_tokens) == expected


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
def test_a_budget_above_the_largest(options: dict[str, Any], max_budget: Any, fits: bool) -> None:
    """What a request gets that asks for nothing, one may ask for."""
    config = KVPolicyConfig(**options, max_budget=max_budget)
    if fits:
        assert config.resolve(1024, 16)
        return
    with pytest.raises(ConfigError, match=f"slots, and max_budget={max_budget!r} is .* for at mos"):
        config.resolve(1024, 16)


@pytest.mark.parametrize(
    ("name", "skipped", "works"),
    [("h2o", 1023, True), ("h2o", 1024, False), ("h2o", 5000, False), ("h2o2", 5000, True)],
)
def test_scores_that_skip_every_token(name: str, skipped: int, works: bool) -> None:
    """The first token is at most so much older than the last; a second pass skips nothing."""
    config = KVPolicyConfig(name, score_skip_recent=skipped)
    if works:
        assert config.resolve(1024, 16)
        return
    with pytest.raises(ConfigError, match=f"score_skip_recent={skipped}; .* no query would score"):
        config.resolve(1024, 16)


@pytest.mark.parametrize(("ratio", "least"), [(0.5, 96), (0.25, 64), (0.0, 48)])
def test_pages_that_are_left_to_evict(ratio: float, least: int) -> None:
    """Recent tokens may touch so many pages that a small budget has none that could go."""
    options = {"granularity": "block", "recent_ratio": ratio}
    assert KVPolicyConfig(budget=least, **options).resolve(1024, 16).capacity == least
    with pytest.raises(ConfigError, match="no page might be left to evict"):
        KVPolicyConfig(budget=least - 16, **options).resolve(1024, 16)
    assert KVPolicyConfig(budget=1.0, **options).resolve(32, 16).capacity == 32
