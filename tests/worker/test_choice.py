"""The kernels follow the device, and what could be built for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.harness import Shape, builder
from vllm_h2o.kernels.cpu import native
from vllm_h2o.kernels.cpu.eager import TorchKernels


def test_cpu() -> None:
    """The C++ kernels compute on a CPU, in the best build that it runs."""
    kernels = builder(Shape(), "h2o").kernels
    assert isinstance(kernels, native.NativeKernels)
    assert kernels.variant == native.available()[0]


def test_cpu_without_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where no library was built, torch computes."""
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    assert isinstance(builder(Shape(), "h2o").kernels, TorchKernels)


def test_cpu_with_odd_heads() -> None:
    """Heads that are no multiple of 16 wide are computed by torch."""
    assert isinstance(builder(Shape(head_size=24), "h2o").kernels, TorchKernels)
