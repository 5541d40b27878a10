# SPDX-License-Identifier: Apache-2.0
"""The kernels follow the device, what could be built for it, and what is asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.config import ParallelConfig, VllmConfig

from tests.kernels.harness import Shape, builder, vllm_config
from vllm_h2o.errors import UnsupportedError
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.kernels.native import loader
from vllm_h2o.kernels.native.kernels import NativeKernels
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.paths import WORKER
from vllm_h2o.worker.selector import select_kernels

BUILT = pytest.mark.skipif(not loader.available(), reason="no native library has been built")
SHAPE, ODD = Shape(), Shape(head_size=24)


def choose(
    asked: str = "auto", shape: Shape = SHAPE, device: str = "cpu", every: int | str = 1
) -> Kernels:
    """For a layer of that shape."""
    spec = builder(shape, "h2o").kv_cache_spec
    config = KVPolicyConfig(kernels=asked, evict_every=every)
    settings = vllm_config("h2o", float8=shape.float8)
    return select_kernels(settings, spec, torch.device(device), config)


@BUILT
@pytest.mark.parametrize("asked", ["auto", "native"])
def test_selector_takes_the_best_build_on_a_cpu(asked: str) -> None:
    """The C++ kernels compute on a CPU, in the best build that it runs."""
    for shape in (SHAPE, Shape(dtype=torch.bfloat16, float8=torch.float8_e5m2)):
        kernels = choose(asked, shape)
        assert isinstance(kernels, NativeKernels)
        assert kernels.variant == loader.available()[0]


def test_cpu_by_torch() -> None:
    """Where torch is asked for, or heads are no multiple of 16 wide, torch computes."""
    assert isinstance(choose("torch"), TorchKernels)
    assert isinstance(choose("auto", ODD), TorchKernels)
    with pytest.raises(UnsupportedError, match="multiples of 16"):
        choose("native", ODD)


def test_cpu_without_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where no library was built, torch computes, unless the C++ ones were asked for by name."""
    monkeypatch.setattr(loader, "FOLDER", tmp_path)
    assert isinstance(choose(), TorchKernels)
    with pytest.raises(UnsupportedError, match="no C.. compiler"):
        choose("native")


def test_a_cache_of_another_dtype() -> None:
    """K and V that must be cast on their way are torch's on a CPU, and nobody's on a GPU."""
    config = VllmConfig(parallel_config=ParallelConfig(worker_cls=WORKER))
    config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    spec = builder(SHAPE, "h2o").kv_cache_spec
    auto, by_name = KVPolicyConfig(), KVPolicyConfig(kernels="native")
    assert isinstance(select_kernels(config, spec, torch.device("cpu"), auto), TorchKernels)
    for device, asked in (("cpu", by_name), ("cuda", auto)):
        with pytest.raises(UnsupportedError, match="--kv-cache-dtype auto"):
            select_kernels(config, spec, torch.device(device), asked)


def test_cuda_has_its_own() -> None:
    """Kernels for a CPU are refused by name on a GPU, and pages that it could not sum."""
    with pytest.raises(UnsupportedError, match="powers of two"):
        choose(shape=Shape(block_size=48), device="cuda", every="page")
    with pytest.raises(UnsupportedError, match="They compute on a CPU"):
        choose("torch", device="cuda")
