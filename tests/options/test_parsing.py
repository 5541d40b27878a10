"""What users write, read as fields and values."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_h2o.errors import ConfigError
from vllm_h2o.options.parsing import carried_options, misspells, named_options, number


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
def test_numerals(written: object, read: object) -> None:
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
def test_both_forms(name: str | None, options: object, fields: dict[str, Any]) -> None:
    """A name, options as a mapping or as JSON, or both."""
    assert named_options(name, options, ["name", "a"]) == fields


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        (None, "{", "not JSON"),
        (None, [1], "a list"),
        ("h2o", {"name": "local"}, "two different policies"),
        (None, {"nane": "h2o"}, "did you mean 'name'"),
    ],
)
def test_refused(name: str | None, options: object, said: str) -> None:
    """Each in four parts."""
    with pytest.raises(ConfigError, match=said):
        named_options(name, options, ["name", "a"])


def test_what_additional_config_carries() -> None:
    """The policy's key alone; a key that is almost it is no silent no-op."""
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
def test_misspelt_keys(key: str, wrong: bool) -> None:
    """Almost the right one is not taken for somebody else's."""
    assert misspells(key, "kv_budget") == wrong
