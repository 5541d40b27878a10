"""H2O: heavy hitters by accumulated attention, and the recent window (arXiv 2306.14048)."""

from vllm_h2o.policy.base import Policy, ScoreKind

H2O = Policy(
    name="h2o",
    summary="heavy hitters by accumulated attention + recent tokens (the paper)",
    score=ScoreKind.SUM,
    keeps_heavy=True,
)
