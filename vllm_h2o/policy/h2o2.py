# SPDX-License-Identifier: Apache-2.0
"""H2O for what a prompt asks, and for what may be asked later.

Differs from the paper: it ranks by mean squares, and the queries of a prompt count in two more
ways. Rotated past the prompt's end, a query finds what followed an earlier mention of its token, as
if the text were read again. The last ones, where a question stands, hold what they look at and the
twelve tokens after it for 128 tokens of output: an answer is read on from where the question
points. The sixteen tokens right before a query get nothing from it, because any token looks at
those.
"""

from vllm_h2o.policy.base import Policy
from vllm_h2o.policy.ranking import Ranking, Term

PAID = Term("all", "mean", power=2)
WINDOW = Term("window", "max", power=2, weight=0.3, reach=12, skip=16, lifetime=128)

COMBINED = Ranking(PAID, Term("rotated", "max", power=2, weight=0.1, block=256), WINDOW)
RECONSTRUCTION = Ranking(PAID, Term("reread", "max", power=2, weight=0.1, block=256), WINDOW)

H2O2 = Policy(
    name="h2o2",
    summary="what the prompt asks, what may be asked later + recent tokens (recommended)",
    ranking=COMBINED,
    score="combined",
    scores={"combined": COMBINED, "reconstruction": RECONSTRUCTION},
    recent_ratio=0.3,
    split="heads",
)
