"""Options are described once: ``--help`` and the checks follow, and conflicts are all reached."""

from __future__ import annotations

import argparse
import logging
from dataclasses import fields
from typing import Any

import pytest

from vllm_h2o.errors import ConfigError
from vllm_h2o.options import parsing
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.conflicts import CONFLICTS
from vllm_h2o.options.flags import add_flags
from vllm_h2o.options.option import help_line, table_row

CONFLICTING = (
    {"split": True, "granularity": "block"},
    {"split": True, "eviction": "pressure"},
    {"split": True, "evict_every": 4},
    {"split": True, "prefill": "chunked"},
    {"split": True, "continuation": True},
    {"split_layers": True},
    {"name": "h2o2", "score": "mean_squares"},
    {"merge": 1},
    {"budget": 64, "budget_basis": "prompt"},
    {"name": "local", "prefill": "window"},
    {"observation_window": 16},
    {"window_score": "sum"},
    {"window_lifetime": 9},
    {"prefill": "window", "observation_window": 0},
    {"prefill": "window", "score": "mean"},
    {"granularity": "block", "score": "mean"},
    {"granularity": "block", "budget_basis": "prompt"},
    {"granularity": "block", "evict_every": 4},
    {"merge": 0.9, "granularity": "block"},
    {"merge": 0.9, "evict_every": 4},
    {"eviction": "pressure", "prefill": "chunked"},
    {"position_limit": 200},
    {"positions": "rolling"},
    {"positions": "rolling", "prefill": "chunked", "score": "second_pass"},
    {"positions": "rolling", "prefill": "chunked", "granularity": "block"},
    {"positions": "rolling", "prefill": "chunked", "merge": 0.9},
    {"continuation": True, "eviction": "pressure"},
    {"continuation": True, "budget_basis": "prompt"},
    {"continuation": True, "merge": 0.9},
    {"continuation": True, "positions": "rolling", "prefill": "chunked"},
    {"pressure_watermark": 0.1},
)
"""Of each conflict, in the order of the table, a configuration that has it and no earlier one."""


@pytest.mark.parametrize(
    ("index", "options"),
    list(enumerate(CONFLICTING)),
    ids=[str(options) for options in CONFLICTING],
)
def test_each_conflict_is_reached(index: int, options: dict[str, object]) -> None:
    """The table has no entry that another hides, or that nothing meets."""
    assert len(CONFLICTS) == len(CONFLICTING)
    with pytest.raises(ConfigError) as caught:
        KVPolicyConfig(**options)  # type: ignore[arg-type]
    assert caught.value.why == CONFLICTS[index].why
    fixed = CONFLICTS[index].found.partition("{")[0]
    assert caught.value.found.startswith(fixed)


def test_split_by_default_where_it_can() -> None:
    """h2o2 does, and where it cannot it does not; others where they are asked to."""
    assert KVPolicyConfig("h2o2").splits and not KVPolicyConfig("h2o2", split=False).splits
    assert not KVPolicyConfig("h2o2", prefill="chunked").splits
    assert not KVPolicyConfig("h2o").splits and KVPolicyConfig("h2o", split=True).splits
    assert KVPolicyConfig.from_options("h2o2", '{"split": false}').split is False


@pytest.mark.parametrize("name", ["split", "split_layers", "continuation"])
@pytest.mark.parametrize("value", ["False", 0, [], 3.5])
def test_switches(name: str, value: Any) -> None:
    """What is on or off is nothing else: `False`, as Python spells it, would mean on."""
    with pytest.raises(ConfigError) as caught:
        KVPolicyConfig("h2o2", **{name: value})
    said = f"asked: {name}={value!r}; is: it is on, or it is not; why not: there is no such choice"
    assert f"{said}; what to do: give true or false, in lower case." in str(caught.value)


def test_help_lists_every_option() -> None:
    """With its meaning and its default, from where it is defined; the name is a flag of its own."""
    parser = argparse.ArgumentParser(formatter_class=argparse.RawTextHelpFormatter)
    add_flags(parser)
    printed = parser.format_help()
    for field in fields(KVPolicyConfig):
        assert (f"- {help_line(field)}" in printed) == (field.name != "name")
        assert table_row(field).startswith(f"| `{field.name}` | ")


@pytest.mark.parametrize(("key", "value"), parsing.RETIRED)
def test_a_retired_spelling_is_taken_with_a_warning(
    key: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, in one line, and with what it is called now."""
    parsing._warn_retired.cache_clear()
    means = parsing.RETIRED[key, value]
    with caplog.at_level(logging.WARNING, "vllm.kv_policy"):
        logging.getLogger("vllm.kv_policy").addHandler(caplog.handler)
        try:
            for _ in range(2):
                config = KVPolicyConfig.from_options(None, {"name": "h2o", key: value})
                assert {option: getattr(config, option) for option in means} == means
        finally:
            logging.getLogger("vllm.kv_policy").removeHandler(caplog.handler)
    now = ", ".join(f"{option}={current}" for option, current in means.items())
    assert {record.getMessage() for record in caplog.records} == {
        f"{key}={value} is now called {now}; the old name goes in the next minor version."
    }


def test_a_retired_name_and_another_score() -> None:
    """Neither is ignored."""
    assert KVPolicyConfig.from_options("h2o_mean", {"score": "mean_squares"}).name == "h2o"
    with pytest.raises(ConfigError, match="name='h2o_replay' means score='second_pass'"):
        KVPolicyConfig.from_options("h2o_replay", {"score": "sum"})
