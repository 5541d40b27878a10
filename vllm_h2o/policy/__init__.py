# SPDX-License-Identifier: Apache-2.0
"""Eviction policies: rankings, schedules, and the split of a budget. No vLLM, no torch."""

from vllm_h2o.policy.base import Policy, Rule, Split
from vllm_h2o.policy.budget import Budget, split_budget
from vllm_h2o.policy.eviction import Eviction
from vllm_h2o.policy.ranking import Ranking, Term
from vllm_h2o.policy.shelf import policies, register_policy

__all__ = [
    "Budget",
    "Eviction",
    "Policy",
    "Ranking",
    "Rule",
    "Split",
    "Term",
    "policies",
    "register_policy",
    "split_budget",
]
