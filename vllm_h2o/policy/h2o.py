"""H2O: heavy hitters by accumulated attention, and the recent window (arXiv 2306.14048).

The paper's is ``score=sum``. Others: squares, so that one query that needs a token counts for more
than many that graze it; means, since a sum favours old tokens, which have met more queries.
"""

from vllm_h2o.policy.base import BUDGET_OPTIONS, Policy, ScoreKind

H2O = Policy(
    name="h2o",
    summary="heavy hitters by accumulated attention + recent tokens (the paper)",
    score=ScoreKind.ATTENTION,
    keeps_heavy=True,
    options=BUDGET_OPTIONS
    | {
        "recent_ratio",
        "granularity",
        "observation_window",
        "window_lifetime",
        "window_score",
        "score",
        "score_skip_recent",
        "split",
        "split_layers",
    },
)
