# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs on a CPU: the launches of one forward pass, which a replay makes again.

A launch is an operator of torch or a Triton kernel. Captured is what a CUDA graph holds of it:
which tensors it reads and writes, and every other argument as it was. No Python of the model or the
policy runs in a replay. So what a step has to change must be in memory that the captured launches
read; what it puts elsewhere, is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
aten = torch.ops.aten
WAITS_FOR_THE_DEVICE = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.lift_fresh.default,  # torch.tensor(): a copy of memory that is not pinned
}
WRITES_NOTHING = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default}


class CaptureError(RuntimeError):
    """Something that no CUDA graph holds."""


class Graph:
    """In the place of ``torch.cuda.CUDAGraph``."""

    num_replays = 0

    def __init__(self) -> None:
        self.launches: list[Callable[[], None]] = []

    @torch.inference_mode()
    def replay(self) -> None:
        """Launch all again."""
        with torch._C.DisableTorchFunction():  # what was captured is on one device
            for launch in self.launches:
                launch()
        Graph.num_replays += 1


@contextmanager
def capture(graph: Graph, pool: object = None, stream: object = None) -> Iterator[None]:
    """In the place of ``torch.cuda.graph``: unlike there, the launches run at once, too."""
    run = interpreter.GridExecutor.__call__

    def run_and_capture(kernel: interpreter.GridExecutor, *args: Any, **kwargs: Any) -> None:
        def launch() -> None:
            run(kernel, *args, **kwargs)

        with _disable_current_modes():
            launch()
        graph.launches.append(launch)

    interpreter.GridExecutor.__call__ = run_and_capture
    try:
        with _Capturing(graph):
            yield
    finally:
        interpreter.GridExecutor.__call__ = run


class _Capturing(TorchDispatchMode):
    """Adds every operator to a graph."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in WAITS_FOR_THE_DEVICE:
            raise CaptureError(f"{func} in a captured forward pass")
        if func.namespace == "vllm":  # written in Python: captured is what it launches
            with self:
                return func.redispatch(CPU, *args, **kwargs)
        result = func(*args, **kwargs)
        written = _tensors(result)
        if func in WRITES_NOTHING:
            return result

        def launch() -> None:
            for old, new in zip(written, _tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.graph.launches.append(launch)
        return result


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
