# SPDX-License-Identifier: Apache-2.0
"""Adds ``--kv-policy``, ``--contextual-sparsity`` and their options to vLLM's commands.

Symbol: vllm.engine.arg_utils:EngineArgs.add_cli_args
Why no seam: flags are made from the config classes; a plugin cannot register one.
What changes: two argument groups more.
Upstream: none yet.
Drop when: vLLM has a registry of plugin flags.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_h2o.options.flags import add_flags
from vllm_h2o.patches._patch import Patch, Symbol
from vllm_h2o.sparsity.flags import add_sparsity_flags


def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` with the flags added to the parser that it returns."""

    def add_cli_args(parser: Any) -> Any:
        return add_sparsity_flags(add_flags(original(parser)))

    return add_cli_args


PATCH = Patch(
    Symbol(
        "vllm.engine.arg_utils:EngineArgs.add_cli_args",
        {"0.32": "05618eb77fc4", "0.33": "a20638a5e820"},
    ),
    wrap,
)
