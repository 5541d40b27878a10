# SPDX-License-Identifier: Apache-2.0
"""Attention sinks: a logit that each query head has learned, of a token that is not there.

It has no V: it takes part in the sum of a softmax, and no token gets its share. gpt-oss has one for
each head (arXiv 2508.10925). The first tokens of a sequence are called sinks, too; they are tokens.

A query that sees other keys than those of its chunk has a logit of its own that stands for them:
the logarithm of the sum of their exponentials. A second reading has such queries.
"""

from __future__ import annotations

import torch

SinkLogits = torch.Tensor | None
"""[Hq], float32, of a layer's query heads, added to no product and scaled by nothing; or None.
Where a term is scored, they may be [T, Hq], of each query."""


def softmax(logits: torch.Tensor, sink_logits: SinkLogits) -> torch.Tensor:
    """``P[j] = exp(logits[j]) / (sum_k exp(logits[k]) + exp(sink))``.

    Args:
        logits: [..., L].
        sink_logits: [...], or what broadcasts to it.

    Returns:
        [..., L]; with a sink less than 1 in sum.

    """
    if sink_logits is None:
        return torch.softmax(logits, dim=-1)
    sink = sink_logits.to(logits.dtype).expand(logits.shape[:-1])
    return torch.softmax(torch.cat([logits, sink[..., None]], dim=-1), dim=-1)[..., :-1]
