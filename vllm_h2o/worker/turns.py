# SPDX-License-Identifier: Apache-2.0
"""Before a step: a conversation's next turn gets a copy of what the last one held."""

from __future__ import annotations

from collections.abc import Collection

import torch

from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.wire import Continuation
from vllm_h2o.worker.after_step import Layers
from vllm_h2o.worker.reconstruction import sent


@torch.inference_mode()
def begin_turns(
    continued: Collection[Continuation], layers: Layers, kernels: Kernels, device: torch.device
) -> None:
    """Copy, in every layer, in order of position: all is read before anything is written.

    Args:
        continued: what begins with this step.
        layers: whose caches hold it.
        kernels: what copies.
        device: of the caches.

    """
    if not continued:
        return
    tables = [
        tuple(sent(torch.tensor(blocks), device) for blocks in (each.source, each.blocks))
        for each in continued
    ]
    for cache in layers.caches():
        held = [
            kernels.hold(cache, source, each.num_slots, each.restored_end)
            for each, (source, _) in zip(continued, tables, strict=True)
        ]
        for (_, blocks), tokens in zip(tables, held, strict=True):
            tokens.store(cache, blocks)
