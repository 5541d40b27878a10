# SPDX-License-Identifier: Apache-2.0
"""Drops the cached tokens of an adapter that is loaded again in place.

Symbol: vllm.v1.engine.core:EngineCore.add_lora
Why no seam: the workers load it, and the scheduler is not told; vLLM's own prefix cache knows an
    adapter by its name and path, which stay the same.
What changes: with ``continuation``, entries of an adapter and the whole prefix cache are dropped
    before it is loaded again in place.
Upstream: none yet.
Drop when: vLLM tells its scheduler that an adapter is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_h2o.hooks import before_load
from vllm_h2o.patches._patch import Patch, Symbol


def wrap(original: Callable[..., bool]) -> Callable[..., bool]:
    """``original``, after the scheduler is told."""

    def add_lora(self: Any, lora_request: Any) -> bool:
        before_load(self, lora_request)
        return original(self, lora_request)

    return add_lora


PATCH = Patch(Symbol("vllm.v1.engine.core:EngineCore.add_lora", "10c2ad978d61"), wrap)
