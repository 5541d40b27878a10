# SPDX-License-Identifier: Apache-2.0
"""Checks a budget when vLLM has fitted ``max_model_len`` to the memory: engine in this process.

Symbol: vllm.v1.engine.core_client:InprocClient.__init__
Why no seam: no plugin is called when an engine is ready, and its scheduler cannot tell in whose
    process it is.
What changes: as in ``mpclient__apply_ready_response``.
Upstream: none yet.
Drop when: vLLM calls plugins with the config of an engine that is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_h2o.hooks import check_fitted
from vllm_h2o.patches._patch import Patch, Symbol


def wrap(original: Callable[..., None]) -> Callable[..., None]:
    """``original``, which starts the engine, and then the check."""

    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        check_fitted(vllm_config)

    return init


PATCH = Patch(Symbol("vllm.v1.engine.core_client:InprocClient.__init__", "bc97477c3699"), wrap)
