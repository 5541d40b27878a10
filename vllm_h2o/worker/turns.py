"""Before a step: what requests continue from is copied into pages of their own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from vllm_h2o.kernels.torch.turn import HeldTokens
from vllm_h2o.wire import Continuation


@torch.inference_mode()
def begin_turns(continued: Collection[Continuation], model_runner: Any) -> None:
    """Copy, in every layer, in order of position: all is read before anything is written.

    Args:
        continued: what begins with this step.
        model_runner: vLLM's, with its layers.

    """
    if not continued:
        return
    layers = model_runner.compilation_config.static_forward_context
    (group,) = model_runner.kv_cache_config.kv_cache_groups
    for layer in (layers[name] for name in group.layer_names):
        cache = layer.impl.cache_of(layer.kv_cache)
        device = cache.position.device
        held = []
        for each in continued:
            source = torch.tensor(each.source, device=device)
            victims = layer.impl.victims[each.source[0]] if each.num_free_slots else None
            limits = (each.num_slots, each.num_free_slots, victims, each.restored_end)
            held.append(HeldTokens.of(cache, source, *limits))
        for each, tokens in zip(continued, held, strict=True):
            tokens.store(cache, torch.tensor(each.blocks, device=device))
