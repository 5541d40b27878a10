"""The eviction policies and the split of a budget. Pure Python: no vLLM, no torch.

A policy is one file that defines one :class:`Policy`, and one name in the tuple below.
"""

from vllm_h2o.policy.base import Policy, ScoreKind
from vllm_h2o.policy.budget import Budget, split_budget
from vllm_h2o.policy.full import FULL
from vllm_h2o.policy.h2o import H2O
from vllm_h2o.policy.h2o2 import H2O2
from vllm_h2o.policy.local import LOCAL
from vllm_h2o.policy.random import RANDOM
from vllm_h2o.policy.scores import SCORES, Score, SecondPass
from vllm_h2o.policy.streaming import STREAMING

POLICIES: dict[str, Policy] = {p.name: p for p in (H2O, H2O2, STREAMING, LOCAL, RANDOM, FULL)}

__all__ = [
    "POLICIES",
    "SCORES",
    "Budget",
    "Policy",
    "Score",
    "ScoreKind",
    "SecondPass",
    "split_budget",
]
