"""The kernels follow the device."""

from __future__ import annotations

from tests.kernels.harness import Shape, builder
from vllm_h2o.kernels.cpu.eager import TorchKernels


def test_cpu() -> None:
    """Torch computes on a CPU."""
    assert isinstance(builder(Shape(), "h2o").kernels, TorchKernels)
