# SPDX-License-Identifier: Apache-2.0
"""H2O: heavy hitters by accumulated attention, and the recent window (arXiv 2306.14048).

The paper's score is the sum. With squares, one query that needs a token counts for more than many
that graze it; a mean does not favour old tokens, which have met more queries.
"""

from vllm_h2o.policy.base import Policy, Rule
from vllm_h2o.policy.ranking import Ranking, Term

H2O = Policy(
    name="h2o",
    summary="heavy hitters by accumulated attention + recent tokens (the paper)",
    ranking=Ranking(Term("all", "sum")),
    score="sum",
    scores={
        "sum_squares": Rule(ranking=Ranking(Term("all", "sum", power=2))),
        "mean": Rule(ranking=Ranking(Term("all", "mean"))),
        "mean_squares": Rule(ranking=Ranking(Term("all", "mean", power=2))),
    },
)
