# SPDX-License-Identifier: Apache-2.0
"""Attention sinks and the recent window: no scores.

Differs from StreamingLLM (arXiv 2309.17453): positions are the original ones, so the model must
reach as far as the text is long. With ``positions=rolling`` they are counted anew when they run
out, not at every step.
"""

from vllm_h2o.policy.base import Policy

STREAMING = Policy(
    name="streaming",
    summary="the first tokens (sinks, 4 by default) + recent tokens",
    num_sink_tokens=4,
)
