# SPDX-License-Identifier: Apache-2.0
"""Checks a budget when vLLM has fitted ``max_model_len`` to the memory: engine in another process.

Symbol: vllm.v1.engine.core_client:MPClient._apply_ready_response
Why no seam: no plugin is called when an engine is ready; what its process raises is not what a
    user reads last.
What changes: with a policy and ``--max-model-len auto``, a budget that the fitted length does not
    allow stops the start. Otherwise nothing.
Upstream: none yet.
Drop when: vLLM calls plugins with the config of an engine that is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_h2o.hooks import check_fitted
from vllm_h2o.patches._patch import Patch, Symbol


def wrap(original: Callable[..., None]) -> Callable[..., None]:
    """``original``, which brings the fitted length, and then the check."""

    def apply_ready_response(self: Any, payload: bytes) -> None:
        original(self, payload)
        check_fitted(self.vllm_config)

    return apply_ready_response


PATCH = Patch(
    Symbol(
        "vllm.v1.engine.core_client:MPClient._apply_ready_response",
        {"0.32": "7e76845f45ec", "0.33": "e0f6eb1fb385"},
    ),
    wrap,
)
