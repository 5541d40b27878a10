# SPDX-License-Identifier: Apache-2.0
"""Lets ``LLM(kv_policy=..., contextual_sparsity=...)`` and ``EngineArgs(...)`` take our arguments.

Symbol: vllm.engine.arg_utils:EngineArgs.__init__
Why no seam: engine arguments are the fields of a dataclass; a plugin cannot add one.
What changes: four keyword arguments more, folded into ``additional_config``.
Upstream: none yet.
Drop when: vLLM passes unknown engine arguments on to plugins.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from vllm_h2o.options.flags import fold_policy
from vllm_h2o.patches._patch import Patch, Symbol
from vllm_h2o.sparsity.flags import fold_sparsity


def wrap(original: Callable[..., None]) -> Callable[..., None]:
    """``original`` with these arguments taken out before it is called."""

    def init(
        self: Any,
        *args: Any,
        kv_policy: Any = None,
        kv_policy_config: Any = None,
        contextual_sparsity: Any = None,
        contextual_sparsity_config: Any = None,
        **kwargs: Any,
    ) -> None:
        original(self, *args, **kwargs)
        fold_policy(self, kv_policy, kv_policy_config)
        fold_sparsity(self, contextual_sparsity, contextual_sparsity_config)

    signature = inspect.signature(original)
    ours = list(inspect.signature(init).parameters.values())[2:6]
    parameters = sorted([*signature.parameters.values(), *ours], key=lambda p: p.kind)
    init.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return init


PATCH = Patch(
    Symbol(
        "vllm.engine.arg_utils:EngineArgs.__init__",
        {"0.32": "4f32e0310dcd", "0.33": "83b23da6a357"},
    ),
    wrap,
)
