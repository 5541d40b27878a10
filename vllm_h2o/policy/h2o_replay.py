"""H2O for what nothing has asked for yet: scores read the prompt a second time.

Differs from the paper: ranks by mean squares, as ``h2o_mean``, and a prompt's queries score a
second time, rotated past its end (``reference.score_second_pass``). In some heads a token's query
looks for what followed that token earlier; in the second pass it finds what follows it in the
prompt. So a fact that is said once scores, as if somebody had come back to it. Costs one more pass
of attention over the prompt.
"""

from vllm_h2o.policy.base import Policy, ScoreKind
from vllm_h2o.policy.h2o import H2O

H2O_REPLAY = Policy(
    name="h2o_replay",
    summary="h2o_mean, prompts ranked as if read twice (facts that are asked for later)",
    score=ScoreKind.ATTENTION,
    keeps_heavy=True,
    default_score="second_pass",
    options=H2O.options,
)
