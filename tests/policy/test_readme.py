"""What vllm_h2o/policy/README.md says can be done, done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_h2o import policy
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.policy import base


def add_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what the README says one of the policies."""
    text = (Path(policy.__file__).parent / "README.md").read_text()
    assert len(text.splitlines()) <= 20
    names = dict(vars(base))
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)  # type: ignore[index]
    monkeypatch.setitem(policy.POLICIES, "scatter", names["SCATTER"])


def test_the_policy_in_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its few lines are a policy, with sinks, a recent window and a random rest."""
    add_scatter(monkeypatch)
    budget = KVPolicyConfig(name="scatter", budget=64, seed=7).resolve(1024, 16)
    assert (budget.num_sinks, budget.num_heavy, budget.num_recent) == (4, 29, 30)
