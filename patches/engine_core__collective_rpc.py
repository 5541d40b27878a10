# SPDX-License-Identifier: Apache-2.0
"""Drops cached tokens when weights may change.

Symbol: vllm.v1.engine.core:EngineCore.collective_rpc
Why no seam: reloads and updates of weights go to the workers by name; neither the scheduler nor a
    plugin hears of them, and vLLM leaves it to the caller to reset its own prefix cache.
What changes: with ``continuation``, entries and the prefix cache are dropped before a method runs
    that may change weights, and requests that run meanwhile leave none. A KV connector stores and
    loads nothing more.
Upstream: none yet.
Drop when: vLLM tells its scheduler that weights have changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_h2o.hooks import before_call
from vllm_h2o.patches._patch import Patch, Symbol


def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, after the scheduler is told."""

    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        before_call(self, method)
        return original(self, method, *args, **kwargs)

    return collective_rpc


PATCH = Patch(Symbol("vllm.v1.engine.core:EngineCore.collective_rpc", "ba0ae8b53494"), wrap)
