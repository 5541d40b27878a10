# SPDX-License-Identifier: Apache-2.0
"""A device that stands in for a GPU: tensors on ``cuda``, which the processor computes.

Operators and launches that take tensors of both places fail, as they do there. What comes to the
host is counted. It lacks time, streams, and an allocator of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from triton.runtime import interpreter

from tests.e2e.gpu_runner import graphs

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
TAKES_BOTH = {torch.Tensor.copy_, torch.Tensor.__setitem__, torch.Tensor.__getitem__}
"""Functions that copy between places, or take indices from either."""


class OnDevice(torch.Tensor):
    """A tensor that is on the device."""


class Event:
    """In the place of ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.time = 0.0

    def record(self) -> None:
        """Note the time."""
        self.time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        return 1e3 * (end.time - self.time)


class Device(TorchFunctionMode):
    """Says of each tensor where it is, and refuses what mixes places.

    Args:
        on_host: bytes of all tensors that were made on the host, at any time.

    """

    def __init__(self) -> None:
        super().__init__()
        self.on_host = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if func == torch.Tensor.device.__get__:  # a new object each time it is asked for
            return CUDA if isinstance(args[0], OnDevice) else CPU
        given = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_on = any(isinstance(tensor, OnDevice) for tensor in given)
        to, args, kwargs = _target(func, args, kwargs)
        host = [t for t in given if not isinstance(t, OnDevice) and t.dim()]
        if is_on and host and func not in TAKES_BOTH:
            raise RuntimeError(f"{func}: tensors on the device and on the host")
        result = func(*args, **kwargs)
        goes_on = is_on if to is None else to.type == "cuda"
        if not goes_on:
            self.on_host += sum(t.nbytes for t in _leaves(result) if isinstance(t, torch.Tensor))
        return _pytree.tree_map_only(torch.Tensor, lambda tensor: _placed(tensor, goes_on), result)


def _leaves(values: Any) -> list[Any]:
    return _pytree.tree_leaves(values)


def _target(func: Any, args: Any, kwargs: Any) -> tuple[torch.device | None, Any, Any]:
    """Where a function's result goes, if it says so, and its arguments for the processor."""
    if func is torch.Tensor.cpu:
        return CPU, args, kwargs
    if func is torch.Tensor.to:
        to = next((torch.device(a) for a in args[1:] if isinstance(a, str | torch.device)), None)
        args = tuple(CPU if isinstance(a, str | torch.device) else a for a in args)
        return to, args, kwargs
    if kwargs.get("device") is None:
        return None, args, kwargs
    return torch.device(kwargs["device"]), args, kwargs | {"device": CPU}


def _placed(tensor: torch.Tensor, goes_on: bool) -> torch.Tensor:
    """The same memory under the other name, if it has to change its place."""
    if isinstance(tensor, OnDevice) == goes_on:
        return tensor
    return tensor.as_subclass(OnDevice if goes_on else torch.Tensor)  # type: ignore[arg-type]


@contextmanager
def standing_in(capability: tuple[int, int] = (9, 0)) -> Iterator[Device]:
    """The device, for as long as the context lasts.

    Args:
        capability: of the device.

    """
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=2,
        shared_memory_per_multiprocessor=228 << 10,
        total_memory=85_520_809_984,
    )
    launch = interpreter.GridExecutor.__call__

    def launched(kernel: interpreter.GridExecutor, *args: Any, **kwargs: Any) -> None:
        tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not all(isinstance(tensor, OnDevice) for tensor in tensors):
            raise ValueError(f"{kernel.fn.__name__}: a launch with a tensor on the host")
        with torch._C.DisableTorchFunction():
            launch(kernel, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, Device() as device:
        patch.setattr(interpreter.GridExecutor, "__call__", launched)
        cuda = {
            "is_available": lambda: True,
            "get_device_capability": lambda *_: capability,
            "get_device_properties": lambda *_: properties,
            "get_device_name": lambda *_: properties.name,
            "synchronize": lambda *_: None,
            "Event": Event,
            "CUDAGraph": graphs.Graph,
            "graph": graphs.capture,
        }
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        yield device
