"""Which kernels compute, by device."""

from __future__ import annotations

import torch

from vllm_h2o.kernels.interface import Kernels


def choose_kernels(device: torch.device) -> Kernels:
    """The fastest that run on ``device``."""
    if device.type == "cuda":
        from vllm_h2o.kernels.triton.kernels import TritonKernels

        return TritonKernels(device)
    from vllm_h2o.kernels.cpu.eager import TorchKernels

    return TorchKernels()
