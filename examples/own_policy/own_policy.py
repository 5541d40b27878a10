# SPDX-License-Identifier: Apache-2.0
"""A policy of one's own: mean attention, what the last queries look at, and four sinks."""

from vllm_h2o.policy import Policy, Ranking, Term

THEIRS = Policy(
    name="theirs",
    summary="mean attention, what the prompt's last queries look at + sinks and recent tokens",
    ranking=Ranking(
        # Every query of prompt and output: the mean of its squared attention probabilities.
        Term("all", "mean", power=2),
        # The last queries of the prompt: the largest, which also holds the next four tokens.
        Term("window", "max", power=2, weight=0.5, reach=4, skip=8),
    ),
    num_sink_tokens=4,
    recent_ratio=0.25,
)
