"""H2O for what a prompt asks, and for what may be asked later.

Differs from the paper: ranks by mean squares, and when a prompt has been computed, two kinds of its
queries score once more (``reference.score_pass``). Some, rotated past its end: in some heads
a token's query looks for what followed that token earlier, and from there it finds what follows it
in the prompt, as if somebody had come back to it; each in its own block, which costs less than the
whole prompt and finds as much. And the last ones, where a question stands: what
they look at stays with the twelve tokens after it, since an answer is read on from where the
question points. Of both the largest contribution counts: one query that needs a token is enough.
"""

from vllm_h2o.policy.base import Policy, ScoreKind
from vllm_h2o.policy.h2o import H2O

H2O2 = Policy(
    name="h2o2",
    summary="what the prompt asks, what may be asked later + recent tokens (recommended)",
    score=ScoreKind.ATTENTION,
    keeps_heavy=True,
    default_recent_ratio=0.3,
    splits=True,
    default_score="combined",
    options=H2O.options - {"window_score", "granularity"},
)
