# SPDX-License-Identifier: Apache-2.0
"""H2O for what a prompt asks, and for what may be asked later.

Differs from the paper: it ranks by mean squares, and the queries of a prompt count in two more
ways. Rotated past the prompt's end, a query finds what followed an earlier mention of its token, as
if the text were read again. The last ones, where a question stands, hold what they look at and the
twelve tokens after it for the first tokens of output: an answer is read on from where the question
points. The sixteen tokens right before a query get nothing from it, because any token looks at
those.

When the prompt ends, its last tokens compete with all others. The recent window grows with the
output, and what is evicted during it is merged into what stays.

With ``score=reconstruction`` the model reads the prompt again, and what that reading attends to
takes the place of the rotated queries. That counts most: what the prompt's own end looks at would
take the slots of what may be asked later, and so would recent tokens in every head, and merging.

With ``score=window`` the last queries of a prompt count alone, for good, and later ones add to
them. Prefix caching needs that: it does not compute the others.
"""

from dataclasses import replace

from vllm_h2o.policy.base import Policy, Rule
from vllm_h2o.policy.ranking import Ranking, Term

PAID = Term("all", "mean", power=2)
WINDOW = Term("window", "max", power=2, weight=0.3, reach=12, skip=16, lifetime=16)

COMBINED = Ranking(PAID, Term("rotated", "max", power=2, weight=0.1, block=256), WINDOW)
RECONSTRUCTION = Ranking(
    PAID,
    Term("reread", "max", power=2, block=512),
    replace(WINDOW, weight=0.03, lifetime=128),
)

LAST = Ranking(Term("window", "max", power=2, reach=12, skip=16))

H2O2 = Policy(
    name="h2o2",
    summary="what the prompt asks, what may be asked later + recent tokens (recommended)",
    ranking=COMBINED,
    first_recent=4,
    merge=0.8,
    score="combined",
    fallback="window",
    scores={
        "reconstruction": Rule(ranking=RECONSTRUCTION, recent_ratio=0.1, split="layers"),
        "window": Rule(ranking=LAST, first_recent=4, merge=0.8),
    },
)
