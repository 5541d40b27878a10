# SPDX-License-Identifier: Apache-2.0
"""Options: their values, their descriptions, and the policies that read them."""

from __future__ import annotations

import argparse
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.options.refusal import refusal
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.flags import add_flags
from vllm_h2o.options.option import help_line, table_row
from vllm_h2o.options.options import Options
from vllm_h2o.policy import Eviction, Policy, Ranking, Term, shelf

FIELDS = {field.name: field for field in fields(Options)}
AGAIN = {"name": "h2o2", "score": "reconstruction"}
TAKEN: dict[str, list[Any]] = {
    "budget": [2, 512, 10**9, 1e-6, 0.2, 1.0, "full"],
    "budget_basis": ["max_model_len", "prompt", "request"],
    "min_budget": [0, 4096],
    "max_budget": [None, 64, 0.5, "full"],
    "recent_ratio": [None, 0, 0.5, 1.0],
    "num_sink_tokens": [None, 0, 4],
    "eviction": ["prompt_end", "chunk", "pressure"],
    "evict_every": [1, 64, "page"],
    "merge": [None, 0, 0.5, 0.999],
    "positions": ["original"],
    "continuation": [True, False, 1, 64, "/kept", "./kept", "/kept:9", "8,/kept", "8,~/kept:100"],
    "kernels": ["auto", "native", "torch", "xformers"],
    "split": [None, "none", "heads", "layers"],
    "score": [None, "sum", "sum_squares", "mean", "mean_squares"],
}
REFUSED: dict[str, list[Any]] = {
    "name": ["quantised", "", 7, None, True, ("h2o",)],
    "budget": [0, 0.0, -3, -0.5, 1.5, math.nan, math.inf, "abc", True, False, None, [1], 2**31],
    "budget_basis": ["output", None],
    "min_budget": [-1, 1.0, True, "many", 2**31],
    "max_budget": [0, 2.5, "none"],
    "recent_ratio": [-0.1, 1.1, math.nan, True, "half", [0.5]],
    "num_sink_tokens": [-1, 1.0, True],
    "eviction": ["always", None],
    "evict_every": [0, -1, 1.5, "block", True, None],
    "observation_window": [0, 1, 2.0],
    "score": ["second_pass", 1],
    "split": [True, False, "all"],
    "merge": [1, 1.0, -0.1, True],
    "positions": ["relative", 0, -5, 1.5, None],
    "continuation": [
        "False",
        0,
        -1,
        0.5,
        [],
        None,
        "/a:0",
        "0,/a",
        "/a,/b",
        "8,9",
        "/a:b",
        ":8",
        "8, /a",
    ],
    "kernels": ["triton", None],
}


def test_options_are_at_most_sixteen() -> None:
    """An option more replaces another."""
    assert len(FIELDS) <= 16


@pytest.mark.parametrize("name", FIELDS)
def test_option_description_is_one_short_sentence(name: str) -> None:
    """At most twenty words; help and documentation write the full stop."""
    meaning = FIELDS[name].metadata["meaning"]
    assert len(meaning.split()) <= 20
    assert meaning[0].isupper() and not meaning.endswith(".")
    assert ". " not in meaning


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in TAKEN.items() for v in vs])
def test_option_takes_value(name: str, value: Any) -> None:
    """It stays as given."""
    assert getattr(KVPolicyConfig(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in REFUSED.items() for v in vs])
def test_option_refuses_value(name: str, value: Any) -> None:
    """The message names the values that it takes, and its meaning."""
    message = refusal(**{name: value})
    assert message.startswith(f"kv-policy: {name}={value!r} is not supported: {name} takes ")
    assert FIELDS[name].metadata["meaning"] in message


def test_option_refusal_reads_as_sentences() -> None:
    """The whole message of each kind of values."""
    assert refusal(evict_every=0) == (
        "kv-policy: evict_every=0 is not supported: evict_every takes a whole number from 1 or "
        "page. Evict N tokens at a time during decode, exceeding the budget by up to N-1; page: "
        "one whole page. Give one of these, or leave evict_every out."
    )
    assert "budget takes a whole number from 1, a fraction in (0, 1] or full. " in refusal(budget=0)
    assert "merge takes a fraction in [0, 1). " in refusal(merge=1)
    assert (
        "continuation takes a whole number from 1, true, false or a path with a slash, without "
        "comma or colon (/PATH, /PATH:N, N,/PATH or N,/PATH:N). " in refusal(continuation="True")
    )


@pytest.mark.parametrize(
    ("options", "suggestion"),
    [({"name": "h20"}, "h2o"), ({"name": "stream"}, "streaming"), ({"split": "head"}, "heads")],
)
def test_option_with_misspelt_word_suggests_one(options: dict[str, Any], suggestion: str) -> None:
    """The nearest word is named."""
    assert refusal(**options).endswith(f" Did you mean {suggestion!r}?")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"name": "full", "min_budget": 64}, "full keeps every token"),
        ({"name": "full", "eviction": "pressure"}, "full keeps every token"),
        ({"name": "full", "recent_ratio": 0.5}, "full keeps every token"),
        ({"name": "full", "budget": 512}, "full keeps every token"),
        ({"name": "full", "budget": 1}, "full keeps every token"),
        ({"name": "full", "budget": 0.5}, "full keeps every token"),
        ({"name": "local", "recent_ratio": 0.3}, "local does not rank tokens"),
        ({"name": "streaming", "split": "heads"}, "streaming does not rank tokens"),
        ({"name": "streaming", "score": "sum"}, "streaming does not rank tokens"),
        ({"observation_window": 16}, "h2o has no term of the prompt's last queries"),
    ],
)
def test_option_that_policy_does_not_read_is_refused(options: dict[str, Any], reason: str) -> None:
    """It would have no effect."""
    *_, name = options
    assert refusal(**options) == (
        f"kv-policy: {name}={options[name]!r} with policy {options.get('name', 'h2o')} is not "
        f"supported: {reason}. The option would have no effect. Leave {name} out, or choose "
        "another policy."
    )


@pytest.mark.parametrize("budget", [0.2, 1.0, "full"])
def test_full_policy_takes_budget_of_every_token(budget: Any) -> None:
    """Every token, or the default."""
    assert KVPolicyConfig("full", budget).resolve(1000, 16).capacity == 1008


@pytest.mark.parametrize(
    ("options", "power", "by_age", "queries"),
    [
        ({}, 1, False, ["all"]),
        ({"score": "sum_squares"}, 2, False, ["all"]),
        ({"score": "mean"}, 1, True, ["all"]),
        ({"name": "h2o2"}, 2, True, ["all", "rotated", "window"]),
        ({"name": "h2o2", "score": "combined"}, 2, True, ["all", "rotated", "window"]),
        ({"name": "h2o2", "score": "reconstruction"}, 2, True, ["all", "reread", "window"]),
        ({"name": "snapkv"}, 1, False, ["window"]),
        ({"name": "local"}, 0, False, []),
    ],
)
def test_score_selects_ranking(
    options: dict[str, Any], power: int, by_age: bool, queries: list[str]
) -> None:
    """Each policy has its own scores."""
    config = KVPolicyConfig(**options)
    ranking = config.ranking
    assert (ranking.power, ranking.by_age) == (power, by_age)
    assert [term.queries for term in ranking.terms] == queries
    assert config.num_window_queries == (64 if "window" in queries else 0)
    assert config.keeps_scores == (config.name == "h2o2")


def test_score_of_another_policy_names_it() -> None:
    """A user who knows the score learns its policy."""
    assert refusal(score="combined") == (
        "kv-policy: score=combined with policy h2o is not supported: h2o takes sum, sum_squares, "
        "mean, mean_squares. score=combined is a ranking of h2o2. Use --kv-policy h2o2, or leave "
        "score out."
    )
    assert "snapkv has one ranking. score=sum is a ranking of h2o. " in refusal(
        name="snapkv", score="sum"
    )


@pytest.mark.parametrize(
    ("options", "schedule"),
    [
        ({}, Eviction()),
        ({"evict_every": 8, "eviction": "chunk"}, Eviction("chunk", 8)),
        ({"evict_every": "page", "eviction": "pressure"}, Eviction("pressure", 1, "page")),
    ],
)
def test_schedule_follows_from_two_options(options: dict[str, Any], schedule: Eviction) -> None:
    """One object for scheduler and worker."""
    assert KVPolicyConfig(**options).schedule == schedule


@pytest.mark.parametrize(
    ("positions", "rolls", "limit"),
    [("original", False, None), ("rolling", True, None), (200, True, 200)],
)
def test_positions_give_limit(positions: Any, rolls: bool, limit: int | None) -> None:
    """A number is the limit; the model's own is not known yet."""
    config = KVPolicyConfig(positions=positions, eviction="chunk")
    assert (config.rolls, config.position_limit) == (rolls, limit)


@pytest.mark.parametrize(
    ("options", "shared", "reason"),
    [
        ({"name": "h2o"}, "none", None),
        ({"name": "h2o", "split": "layers"}, "layers", None),
        ({"name": "h2o2"}, "none", None),
        ({"name": "h2o2", "split": "heads"}, "heads", None),
        (AGAIN, "layers", None),
        ({**AGAIN, "split": "none"}, "none", None),
        ({**AGAIN, "split": "heads"}, "heads", None),
        ({**AGAIN, "eviction": "chunk"}, "none", "eviction=chunk"),
        ({**AGAIN, "eviction": "pressure"}, "none", "eviction=pressure"),
        ({**AGAIN, "evict_every": 8}, "none", "evict_every=8"),
        ({**AGAIN, "evict_every": "page"}, "none", "evict_every=page"),
        ({**AGAIN, "continuation": True}, "layers", None),
        ({"name": "h2o", "evict_every": 8}, "none", None),
    ],
)
def test_split_by_default_gives_way_and_says_why(
    options: dict[str, Any], shared: str, reason: str | None
) -> None:
    """The policy's default, unless the user or another option decides."""
    config = KVPolicyConfig(**options)
    assert (config.shared_slots, config.split_reason) == (shared, reason)
    assert (config.splits, config.splits_layers) == (shared != "none", shared == "layers")


@pytest.mark.parametrize(
    ("options", "above", "reason"),
    [
        ({"name": "h2o"}, 0.0, None),
        ({"name": "h2o", "evict_every": 8}, 0.0, None),
        ({"name": "h2o", "merge": 0.5}, 0.5, None),
        ({"name": "h2o2"}, 0.8, None),
        ({"name": "h2o2", "merge": 0}, 0.0, None),
        ({"name": "h2o2", "merge": 0.5}, 0.5, None),
        ({"name": "h2o2", "split": "heads"}, 0.8, None),
        ({"name": "h2o2", "eviction": "pressure"}, 0.8, None),
        ({"name": "h2o2", "evict_every": 8}, 0.0, "evict_every=8"),
        ({"name": "h2o2", "evict_every": "page"}, 0.0, "evict_every=page"),
        ({"name": "h2o2", "continuation": True}, 0.0, "continuation=true"),
        (AGAIN, 0.0, None),
    ],
)
def test_merge_by_default_gives_way_and_says_why(
    options: dict[str, Any], above: float, reason: str | None
) -> None:
    """The rule's default, unless the user or another option decides."""
    config = KVPolicyConfig(**options)
    assert (config.merge_above, config.merge_reason()) == (above, reason)
    assert config.merges is (above > 0)
    assert config.extra_words == config.merges + config.keeps_scores


def test_defaults_follow_from_the_score() -> None:
    """The same policy, with another rule."""
    own, again = KVPolicyConfig("h2o2"), KVPolicyConfig(**AGAIN)
    assert (own.effective_recent_ratio, again.effective_recent_ratio) == (0.5, 0.1)
    assert own.resolve(1024, 16).recent_at(0) == 4
    assert again.resolve(1024, 16).recent_at(0) == again.resolve(1024, 16).num_recent > 4


def test_help_lists_every_option() -> None:
    """Each with its meaning and its default; the name is a flag of its own."""
    parser = argparse.ArgumentParser(formatter_class=argparse.RawTextHelpFormatter)
    add_flags(parser)
    printed = parser.format_help()
    for name, field in FIELDS.items():
        assert (f"- {help_line(field)}" in printed) == (name != "name")
        assert table_row(field).startswith(f"| `{name}` | ")


def test_policy_of_another_package_has_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Help, suggestions and scores know it."""
    peak = Ranking(Term("window", "max", power=2))
    theirs = Policy(name="theirs", summary="one query is enough", ranking=peak, score="peak")
    monkeypatch.setitem(shelf._SHELF, "theirs", theirs)
    config = KVPolicyConfig("theirs", observation_window=8, score="peak", evict_every="page")
    assert (config.ranking, config.num_window_queries) == (peak, 8)
    assert refusal(name="thiers").endswith(" Did you mean 'theirs'?")
    assert "score=peak is a ranking of theirs. Use --kv-policy theirs" in refusal(score="peak")
    parser = argparse.ArgumentParser(formatter_class=argparse.RawTextHelpFormatter)
    add_flags(parser)
    assert "- theirs: one query is enough" in parser.format_help()


@pytest.mark.parametrize(
    ("asked", "memory", "path", "files"),
    [
        (True, 0, None, 0),
        (8, 8, None, 0),
        ("/kept", 0, Path("/kept"), 0),
        ("~/kept:100", 0, Path.home() / "kept", 100),
        ("8,kept/", 8, Path.cwd() / "kept", 0),
        ("8,/kept:100", 8, Path("/kept"), 100),
    ],
)
def test_continuation_names_places(
    asked: int | str, memory: int, path: Path | None, files: int
) -> None:
    """Each is GiB or a folder; a number after the folder bounds its files."""
    options = KVPolicyConfig(continuation=asked)
    found = (options.continuation_host_bytes, options.continuation_folder_bytes)
    assert (options.continuation_folder, *found) == (path, memory << 30, files << 30)
