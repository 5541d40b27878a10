"""What vllm_h2o/policy/README.md says can be done, done."""

from __future__ import annotations

import pytest

from tests.policy.scatter import add_scatter
from vllm_h2o.options.config import KVPolicyConfig


def test_the_policy_in_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its few lines are a policy, with sinks, a recent window and a random rest."""
    add_scatter(monkeypatch)
    budget = KVPolicyConfig(name="scatter", budget=64, seed=7).resolve(1024, 16)
    assert (budget.num_sinks, budget.num_heavy, budget.num_recent) == (4, 29, 30)
