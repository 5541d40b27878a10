# SPDX-License-Identifier: Apache-2.0
"""Adds ``--kv-policy`` and ``--kv-policy-config`` to every command that takes engine arguments.

Symbol: vllm.engine.arg_utils:EngineArgs.add_cli_args
Why no seam: flags are made from the config classes; a plugin cannot register one.
What changes: an argument group more.
Upstream: none yet.
Drop when: vLLM has a registry of plugin flags.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_h2o.options.flags import add_flags
from vllm_h2o.patches._patch import Patch, Symbol


def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` with the flags added to the parser that it returns."""

    def add_cli_args(parser: Any) -> Any:
        return add_flags(original(parser))

    return add_cli_args


PATCH = Patch(
    Symbol(
        "vllm.engine.arg_utils:EngineArgs.add_cli_args",
        {"0.32": "05618eb77fc4", "0.33": "a20638a5e820"},
    ),
    wrap,
)
