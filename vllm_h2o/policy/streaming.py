"""Attention sinks and the recent window, at their original positions.

Differs from the paper of StreamingLLM (arXiv 2309.17453): positions are not re-assigned inside the
cache, so the model must be able to reach as far as the text is long.
"""

from vllm_h2o.policy.base import Policy, ScoreKind

STREAMING = Policy(
    name="streaming",
    summary="the first tokens (sinks, 4 by default) + recent tokens, original positions",
    score=ScoreKind.NONE,
    keeps_heavy=False,
    default_num_sink_tokens=4,
)
