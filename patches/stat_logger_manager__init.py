# SPDX-License-Identifier: Apache-2.0
"""Adds numbers of a policy, and of contextual sparsity, to ``/metrics`` and the periodic log.

Symbol: vllm.v1.metrics.loggers:StatLoggerManager.__init__
Why no seam: the entry points ``vllm.stat_logger_plugins`` are read by the server alone, not by
    ``LLM``, and one that is merely installed turns statistics on against ``--disable-log-stats``.
What changes: with a policy, one logger more, and one with contextual sparsity; else nothing.
Upstream: none yet.
Drop when: vLLM reads these entry points for ``LLM``, too, and leaves statistics off with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_h2o.hooks import add_stat_logger
from vllm_h2o.patches._patch import Patch, Symbol


def wrap(original: Callable[..., None]) -> Callable[..., None]:
    """``original``, and then the loggers."""

    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        add_stat_logger(self, vllm_config)

    return init


PATCH = Patch(Symbol("vllm.v1.metrics.loggers:StatLoggerManager.__init__", "53be10699999"), wrap)
