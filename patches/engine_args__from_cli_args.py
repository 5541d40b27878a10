# SPDX-License-Identifier: Apache-2.0
"""Carries the four flags from the command line into the engine arguments.

Symbol: vllm.engine.arg_utils:EngineArgs.from_cli_args
Why no seam: only the dataclass's own fields are read from the namespace.
What changes: the flags are folded into ``additional_config``.
Upstream: none yet.
Drop when: vLLM has a registry of plugin flags.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_h2o.options.flags import fold_policy
from vllm_h2o.patches._patch import Patch, Symbol
from vllm_h2o.sparsity.flags import fold_sparsity


def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` with the flags folded into what it returns."""

    def from_cli_args(cls: type, args: Any) -> Any:
        flags = vars(args)
        made = original(cls, args)
        fold_policy(made, flags.get("kv_policy"), flags.get("kv_policy_config"))
        sparsity = ("contextual_sparsity", "contextual_sparsity_config")
        return fold_sparsity(made, *map(flags.get, sparsity))

    return from_cli_args


PATCH = Patch(Symbol("vllm.engine.arg_utils:EngineArgs.from_cli_args", "ef4a4108d032"), wrap)
