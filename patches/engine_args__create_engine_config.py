# SPDX-License-Identifier: Apache-2.0
"""Turns a policy in ``additional_config`` into vLLM's own options, and refuses what does not go.

Symbol: vllm.engine.arg_utils:EngineArgs.create_engine_config
Why no seam: ``additional_config`` is handed on unread; nothing is called with the finished config.
What changes: with a policy, scheduler, worker, attention backend and prefix caching are set before,
    and the finished config captures more sequences and is checked after; where positions roll, vLLM
    takes the length that the model was trained on, and the one that was asked for is set after.
    With contextual sparsity, quantization is set before and the model is checked after.
    Without either, nothing.
Upstream: none yet.
Drop when: vLLM calls plugins with the engine arguments and the finished config.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_h2o.hooks import finish, of_trained_length, prepare
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.remedies import given_arguments
from vllm_h2o.patches._patch import Patch, Symbol
from vllm_h2o.patches._with_policy import activate_front_end, activate_metrics
from vllm_h2o.sparsity.hooks import check_sparsity, prepare_sparsity


def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` between preparation and check."""

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = KVPolicyConfig.from_additional_config(self.additional_config)
        activate_front_end(asked)
        # Before anybody changes them.
        given = given_arguments(self) if asked is not None else frozenset()
        config, sparsity = prepare(self), prepare_sparsity(self)
        activate_metrics(sparsity)
        made = original(of_trained_length(self, config), *args, **kwargs)
        return finish(check_sparsity(made, sparsity), self, config, given)

    return create_engine_config


PATCH = Patch(
    Symbol(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        {"0.32": "483c1f351b6a", "0.33": "6e2b45b72304"},
    ),
    wrap,
)
