"""Before a step: what requests continue from is copied into pages of their own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from vllm_h2o.kernels.torch.turn import HeldTokens
from vllm_h2o.wire import Continuation
from vllm_h2o.worker.reconstruction import sent


@torch.inference_mode()
def begin_turns(continued: Collection[Continuation], model_runner: Any) -> None:
    """Copy, in every layer, in order of position: all is read before anything is written.

    Args:
        continued: what begins with this step.
        model_runner: vLLM's, with its layers.

    """
    if not continued:
        return
    device = model_runner.device
    tables = [
        tuple(sent(torch.tensor(blocks), device) for blocks in (each.source, each.blocks))
        for each in continued
    ]
    layers = model_runner.compilation_config.static_forward_context
    (group,) = model_runner.kv_cache_config.kv_cache_groups
    for layer in (layers[name] for name in group.layer_names):
        cache = layer.impl.cache_of(layer.kv_cache)
        held = []
        for each, (source, _) in zip(continued, tables, strict=True):
            victims = layer.impl.victims[each.source[0]] if each.num_free_slots else None
            limits = (each.num_slots, each.num_free_slots, victims, each.restored_end)
            held.append(HeldTokens.of(cache, source, *limits))
        for (_, blocks), tokens in zip(tables, held, strict=True):
            tokens.store(cache, blocks)
