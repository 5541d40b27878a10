# SPDX-License-Identifier: Apache-2.0
"""Policies that other packages bring: registered in a process, or named as entry points."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from vllm_h2o import policy as package
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.policy import Policy, Ranking, Term, policies, register_policy, shelf

THEIRS = Policy(
    name="theirs",
    summary="a test's",
    ranking=Ranking(Term("window", "sum"), Term("rotated", "max", weight=0.2)),
    num_sink_tokens=2,
)


@pytest.fixture(autouse=True)
def own_shelf(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A shelf that is thrown away, and entry points that are read again."""
    monkeypatch.setattr(shelf, "_SHELF", dict(shelf._SHELF))
    shelf._load_entry_points.cache_clear()
    yield
    shelf._load_entry_points.cache_clear()


def installs(monkeypatch: pytest.MonkeyPatch, *values: str) -> None:
    """Let the environment have entry points with these values."""
    entries = [EntryPoint("theirs", value, shelf.GROUP) for value in values]
    monkeypatch.setattr(shelf, "entry_points", lambda group: entries)


def test_register_policy_puts_it_on_the_shelf() -> None:
    """Options take its name from then on, and its defaults."""
    assert register_policy(THEIRS) is THEIRS and register_policy(THEIRS) is THEIRS
    config = KVPolicyConfig(name="theirs", budget=64)
    assert config.policy is THEIRS and config.ranking is THEIRS.ranking
    assert config.resolve(1024, 16).num_sinks == 2


def test_register_policy_refuses_a_name_that_is_taken() -> None:
    """The policies of this package are never replaced."""
    with pytest.raises(ValueError, match="another policy 'h2o'"):
        register_policy(Policy(name="h2o", summary="another"))
    assert policies()["h2o"].summary != "another"


def test_entry_points_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, when policies are first asked for; two packages may name the same one."""
    installs(monkeypatch, f"{__name__}:THEIRS", f"{__name__}:THEIRS")
    assert policies()["theirs"] is THEIRS
    installs(monkeypatch, f"{__name__}:GONE")
    assert policies()["theirs"] is THEIRS


def test_an_entry_point_that_is_no_policy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its name, so that the package can be found."""
    installs(monkeypatch, f"{__name__}:installs")
    with pytest.raises(ValueError, match="entry point theirs of vllm_h2o.policies is no Policy"):
        policies()


def test_the_policy_in_the_readme() -> None:
    """Its few lines define a policy that can be registered and configured."""
    text = (Path(package.__file__).parent / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None and len(code[1].splitlines()) <= 20
    names: dict[str, Policy] = {}
    exec(code[1], names)
    register_policy(names["THEIRS"])
    budget = KVPolicyConfig(name="theirs", budget=64).resolve(1024, 16)
    assert (budget.num_sinks, budget.num_heavy, budget.num_recent) == (4, 44, 15)
