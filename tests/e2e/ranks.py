# SPDX-License-Identifier: Apache-2.0
"""Processes of ranks, stages and replicas, forked from one that has imported vLLM already.

vLLM spawns them on a CPU, and each takes ten seconds to import the same modules.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import context
from multiprocessing.forkserver import set_forkserver_preload
from typing import Any

import torch._dynamo
from vllm.v1.engine import coordinator, utils
from vllm.v1.executor import multiproc_executor as executor
from vllm.v1.worker import cpu_worker  # noqa: F401 (what takes so long)

from tests.e2e import oracle  # noqa: F401 (and the plugin with its kernels)


def _started(environ: dict[str, str], target: Callable[..., None], kwargs: Any) -> None:
    """In a worker: the parent's environment, which a spawned process would have."""
    os.environ.clear()
    os.environ.update(environ)
    torch._dynamo.config.disable = environ.get("TORCH_COMPILE_DISABLE") == "1"
    target(**kwargs)


class ForkedContext(context.ForkServerContext):
    """Whose processes begin where this module has been imported."""

    def Process(self, target: Callable[..., None], kwargs: Any, **rest: Any) -> Any:  # type: ignore[override]  # noqa: N802
        """A process for a function; as vLLM asks for it."""
        return super().Process(target=_started, args=(dict(os.environ), target, kwargs), **rest)


def fork(patch: Any) -> None:
    """All processes that vLLM starts from this one are forked, until the patch is undone."""
    set_forkserver_preload([__name__])
    for module in (executor, utils, coordinator):
        patch.setattr(module, "get_mp_context", ForkedContext)


def install(patch: Any) -> None:
    """Two workers of vLLM's executor are forked, with a core each, until the patch is undone."""
    first, last = (f(os.sched_getaffinity(0)) for f in (min, max))
    # On one NUMA node vLLM asks for that.
    patch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{first}|{last}")
    fork(patch)
