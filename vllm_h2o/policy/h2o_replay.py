"""H2O for what nothing has asked for yet: scores read the prompt a second time.

Differs from the paper: ranks by mean squares, as ``h2o_mean``, and a prompt's queries
are asked once more, from behind its end (``reference.replay``). In some heads a token's query
looks for what followed that token earlier; asked again, it finds what follows it in the prompt. So
a fact that is said once scores, as if somebody had come back to it. Costs one more pass of
attention over the prompt.
"""

from vllm_h2o.policy.base import Policy, ScoreKind
from vllm_h2o.policy.h2o import H2O

H2O_REPLAY = Policy(
    name="h2o_replay",
    summary="h2o_mean, prompts ranked as if read twice (facts that are asked for later)",
    score=ScoreKind.SUM,
    keeps_heavy=True,
    default_score="replay",
    options=H2O.options,
)
