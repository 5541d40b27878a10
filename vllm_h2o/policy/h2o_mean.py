"""H2O, ranked by the mean square of the attention that a token has received per query.

Differs from the paper in two ways. Squares: one query that needs a token counts for more than many
that graze it, so that a detail survives which is rarely looked at. Means: a sum favours old tokens,
which have met more queries; a mean, over all queries since the token was stored, does not.
"""

from vllm_h2o.policy.base import Policy, ScoreKind
from vllm_h2o.policy.h2o import H2O

H2O_MEAN = Policy(
    name="h2o_mean",
    summary="heavy hitters by mean squared attention + recent tokens (small budgets, retrieval)",
    score=ScoreKind.ATTENTION,
    keeps_heavy=True,
    default_score="mean_squares",
    options=H2O.options,
)
