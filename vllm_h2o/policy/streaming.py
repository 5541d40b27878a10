"""Attention sinks and the recent window.

Differs from the paper of StreamingLLM (arXiv 2309.17453): positions are the original ones, so the
model must be able to reach as far as the text is long; with ``positions=rolling`` they are
re-assigned inside the cache when they run out, not at every step.
"""

from vllm_h2o.policy.base import Policy, ScoreKind

STREAMING = Policy(
    name="streaming",
    summary="the first tokens (sinks, 4 by default) + recent tokens",
    score=ScoreKind.NONE,
    keeps_heavy=False,
    default_num_sink_tokens=4,
)
