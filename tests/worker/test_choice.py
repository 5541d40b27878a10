"""The kernels follow the device, what could be built for it, and what is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.harness import Shape, builder, vllm_config
from vllm_h2o.errors import UnsupportedError
from vllm_h2o.kernels.cpu import native
from vllm_h2o.kernels.cpu.eager import TorchKernels
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.worker.choice import choose_kernels


def choose(asked: str = "auto", head_size: int = 64, device: str = "cpu") -> Kernels:
    """For a layer with heads of that size."""
    spec = builder(Shape(head_size=head_size), "h2o").kv_cache_spec
    return choose_kernels(vllm_config("h2o"), spec, torch.device(device), asked)


@pytest.mark.parametrize("asked", ["auto", "native"])
def test_cpu(asked: str) -> None:
    """The C++ kernels compute on a CPU, in the best build that it runs."""
    kernels = choose(asked)
    assert isinstance(kernels, native.NativeKernels)
    assert kernels.variant == native.available()[0]


def test_cpu_by_torch() -> None:
    """Where torch is asked for, or heads are no multiple of 16 wide, torch computes."""
    assert isinstance(choose("torch"), TorchKernels)
    assert isinstance(choose("auto", head_size=24), TorchKernels)
    with pytest.raises(UnsupportedError, match="multiples of 16"):
        choose("native", head_size=24)


def test_cpu_without_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where no library was built, torch computes, unless the C++ ones were asked for by name."""
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    assert isinstance(choose(), TorchKernels)
    with pytest.raises(UnsupportedError, match="no C.. compiler"):
        choose("native")


def test_cuda_has_its_own() -> None:
    """Kernels for a CPU are refused by name on a GPU."""
    with pytest.raises(UnsupportedError, match="they compute on a CPU"):
        choose("torch", device="cuda")
