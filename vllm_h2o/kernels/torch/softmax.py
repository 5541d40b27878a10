# SPDX-License-Identifier: Apache-2.0
"""Probabilities where heads may have attention sinks. Twin of ``sinks.softmax``."""

from __future__ import annotations

import torch

from vllm_h2o.kernels.sinks import SinkLogits


def softmax(logits: torch.Tensor, sink_logits: SinkLogits) -> torch.Tensor:
    """Softmax without sinks, times what the sinks leave: ``sigmoid(lse - sink)``.

    Args:
        logits: [..., L], float32.
        sink_logits: [...], or what broadcasts to it.

    Returns:
        [..., L], float32.

    """
    probs = torch.softmax(logits, dim=-1)
    if sink_logits is None:
        return probs
    return probs.mul_(torch.sigmoid(torch.logsumexp(logits, dim=-1) - sink_logits)[..., None])
