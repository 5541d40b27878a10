"""Recent tokens and a uniformly random choice of the rest: the floor of every comparison.

Each token draws its number once, when it is stored, from (seed, layer, KV head, position). The best
H of independent draws are a uniform sample of all tokens seen so far, whichever the step. Requests
that bring no seed have the configuration's, and keep the same positions.
"""

from vllm_h2o.policy.base import BUDGET_OPTIONS, Policy, ScoreKind

RANDOM = Policy(
    name="random",
    summary="recent tokens + a random choice of the rest (the floor of comparisons)",
    score=ScoreKind.RANDOM,
    keeps_heavy=True,
    options=BUDGET_OPTIONS | {"recent_ratio", "seed"},
)
