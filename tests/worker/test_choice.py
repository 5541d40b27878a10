"""The kernels follow the device."""

from __future__ import annotations

import torch

from vllm_h2o.kernels.cpu.eager import TorchKernels
from vllm_h2o.worker.choice import choose_kernels


def test_cpu() -> None:
    """Torch computes on a CPU."""
    assert isinstance(choose_kernels(torch.device("cpu")), TorchKernels)
