# SPDX-License-Identifier: Apache-2.0
"""Parsing: what users write, read as fields and values."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.options.refusal import refusal
from vllm_h2o.errors import ConfigError
from vllm_h2o.options import parsing
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.parsing import ANY, carried_options, misspells, named_options, number


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("512", 512),
        ("0.2", 0.2),
        ("1.0", 1.0),
        ("-3", -3),
        ("full", "full"),
        (None, None),
        (7, 7),
        ("\u0663\u0662", "\u0663\u0662"),
    ],
)
def test_number_reads_ascii_numerals(written: object, read: object) -> None:
    """Text that spells a number is that number, of its own kind; anything else stays."""
    assert number(written) == read
    assert type(number(written)) is type(read)


@pytest.mark.parametrize(
    ("name", "options", "fields"),
    [
        ("h2o", None, {"name": "h2o"}),
        (None, {"a": "1"}, {"a": 1}),
        ("h2o", '{"a": 0.5, "name": "h2o"}', {"a": 0.5, "name": "h2o"}),
    ],
)
def test_named_options_reads_both_forms(
    name: str | None, options: object, fields: dict[str, Any]
) -> None:
    """A name, options as a mapping or as JSON, or both."""
    assert named_options(name, options, ["name", "a"]) == fields


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (None, "{", "it is not JSON"),
        (None, "budget=0.2", "it is not JSON"),
        (None, [1], "its type is list. Options are a mapping"),
        (None, "3", "its type is int. Options are a mapping"),
        ("h2o", {"name": "local"}, "these are two policies"),
        (None, {"nane": "h2o"}, r"option 'nane' .* Did you mean 'name'\?"),
        (None, {"zzz": "h2o"}, r"the options are name, a. No policy reads it. Remove it\."),
        (None, {3: "h2o"}, "option '3'"),
    ],
)
def test_named_options_refuses(name: str | None, options: object, message: str) -> None:
    """The message quotes what was written."""
    with pytest.raises(ConfigError, match=message):
        named_options(name, options, ["name", "a"])


def test_carried_options_reads_one_key() -> None:
    """A key that is almost the policy's is refused."""
    assert carried_options({"kv_policy": "h2o", "other": 1}) == "h2o"
    assert carried_options({"other": 1}) is None
    assert carried_options(None) is None
    with pytest.raises(ConfigError, match="'KV-policy'"):
        carried_options({"KV-policy": "h2o"})


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("kv_budget", False),
        ("kv_bugdet", True),
        ("kvbudget", True),
        ("KV-Budget", True),
        ("kv_budgets", True),
        ("kv_transfer_params", False),
        ("budget", False),
        ("seed", False),
    ],
)
def test_misspells_finds_near_misses(key: str, wrong: bool) -> None:
    """Keys of others are left alone."""
    assert misspells(key, "kv_budget") == wrong


@contextmanager
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Record the policy's warnings, each anew."""
    parsing._warn_retired.cache_clear()
    logger = logging.getLogger("vllm.kv_policy")
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("written", "fields", "now"),
    [
        ({"eviction": "always"}, {"eviction": "prompt_end"}, "use eviction=prompt_end"),
        ({"prefill": "full"}, {}, "leave it out"),
        ({"prefill": "chunked"}, {"eviction": "chunk"}, "use eviction=chunk"),
        ({"granularity": "token"}, {}, "leave it out"),
        ({"granularity": "block"}, {"evict_every": "page"}, "use evict_every=page"),
        ({"split": True}, {"split": "heads"}, "use split=heads"),
        ({"split": False}, {"split": "none"}, "use split=none"),
        ({"split_layers": True}, {"split": "layers"}, "use split=layers"),
        ({"split_layers": False}, {}, "leave it out"),
        (
            {"position_limit": 200, "eviction": "chunk"},
            {"positions": 200, "eviction": "chunk"},
            "use positions=200",
        ),
    ],
)
def test_retired_spelling_is_read_with_one_warning(
    written: dict[str, Any], fields: dict[str, Any], now: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names the options of today."""
    with warned(caplog):
        for _ in range(2):
            assert KVPolicyConfig.from_options("h2o", written) == KVPolicyConfig(**fields)
    key = next(iter(written))
    assert {record.getMessage() for record in caplog.records} == {
        f"{key}={written[key]} is retired and goes in the next minor version: {now}."
    }


@pytest.mark.parametrize(
    ("written", "fields"),
    [
        ({"eviction": "always", "prefill": "chunked"}, {"eviction": "chunk"}),
        ({"prefill": "chunked", "eviction": "always"}, {"eviction": "chunk"}),
        ({"split": True, "split_layers": True}, {"split": "layers"}),
        ({"split_layers": True, "split": True}, {"split": "layers"}),
        ({"split": True, "split_layers": False}, {"split": "heads"}),
        (
            {"positions": "rolling", "position_limit": 99, "prefill": "chunked"},
            {"positions": 99, "eviction": "chunk"},
        ),
        ({"positions": "rolling", "position_limit": None, "prefill": "chunked"}, None),
    ],
)
def test_retired_spellings_together_mean_what_they_meant(
    written: dict[str, Any], fields: dict[str, Any] | None
) -> None:
    """In either order."""
    expected = fields or {"positions": "rolling", "eviction": "chunk"}
    assert KVPolicyConfig.from_options("h2o", written) == KVPolicyConfig(**expected)


@pytest.mark.parametrize(
    "written",
    [
        {"prefill": "chunked", "eviction": "pressure"},
        {"prefill": "chunked", "eviction": "prompt_end"},
        {"granularity": "block", "evict_every": 4},
        {"granularity": "block", "evict_every": 1},
        {"split_layers": True, "split": False},
        {"split_layers": True, "split": "heads"},
        {"position_limit": 99, "positions": "original"},
    ],
)
def test_retired_spelling_that_contradicts_is_refused(written: dict[str, Any]) -> None:
    """One of the two would be ignored, also where a refusal said to give the other."""
    key, value = next(iter(written.items()))
    message = refusal("h2o", written)
    assert message.startswith(f"kv-policy: {key}={value!r} with ")
    assert message.endswith(f" An option has one value. Leave {key} out.")


@pytest.mark.parametrize(
    ("key", "value"),
    [key for key, row in parsing.RETIRED.items() if row.gone],
    ids=lambda word: word if isinstance(word, str) else "any",
)
def test_removed_option_names_its_replacement(key: str, value: object) -> None:
    """No other option has its meaning."""
    row = parsing.RETIRED[key, value]
    written = "3" if value is ANY else value
    message = refusal(None, {key: written})
    assert message.startswith(f"kv-policy: {key}={number(written)!r} is not supported: it was ")
    assert message.endswith(f"{row.gone[0].upper()}{row.gone[1:]}.")
