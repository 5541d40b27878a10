# SPDX-License-Identifier: Apache-2.0
"""The kernels of a ReLU model's MLP by neurons compute what the reference does."""

from __future__ import annotations

import pytest
import torch

from vllm_h2o.kernels import neurons
from vllm_h2o.kernels.native import loader
from vllm_h2o.kernels.native.neurons import NativeNeurons
from vllm_h2o.kernels.neurons import NeuronKernels
from vllm_h2o.kernels.torch.neurons import TorchNeurons

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def kernels(name: str) -> NeuronKernels:
    """Torch's, or the variant of the C++ kernels with this name."""
    if name == "torch":
        return TorchNeurons()
    native = loader.load(name)
    return NativeNeurons(native.variant, native.library)


NAMES = ["torch", *loader.available()]


def activations(tokens: int, count: int, zeros: float, dtype: torch.dtype) -> torch.Tensor:
    """After ReLU: positive, or zero in this share; the share is exact."""
    x = torch.rand(tokens, count) + 0.1
    for row in x:
        row[torch.randperm(count)[: round(zeros * count)]] = 0
    return x.to(dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.95, 1.0])
def test_down_equals_the_reference(name: str, dtype: torch.dtype, zeros: float) -> None:
    """Widths that are a tile, less than a vector, and more than a tile; with and without a bias."""
    torch.manual_seed(0)
    for tokens, count, width in ((1, 200, 64), (3, 128, 36), (8, 96, 1100), (1, 64, 2500)):
        x = activations(tokens, count, zeros, dtype)
        rows = torch.randn(count, width).to(dtype)
        for bias in (None, torch.randn(width).to(dtype)):
            counts = torch.zeros(2, dtype=torch.int64)
            y = kernels(name).down(x, rows, bias, counts)
            assert y.dtype == dtype
            scale = ROUNDING[dtype] * count**0.5
            torch.testing.assert_close(y, neurons.down(x, rows, bias), rtol=1e-2, atol=scale)
            assert counts.tolist() == [int(neurons.used_neurons(x).sum()), count]


@pytest.mark.parametrize("name", NAMES)
def test_down_reads_no_row_of_zero_input(name: str) -> None:
    """A row that would make the sum a NaN is not there for a token that does not use it."""
    x = torch.tensor([[1.0, 0.0, 2.0, -0.0]])
    rows = torch.ones(4, 32)
    rows[1] = rows[3] = float("nan")
    y = kernels(name).down(x, rows, None, torch.zeros(2, dtype=torch.int64))
    assert y.tolist() == [[3.0] * 32]


@pytest.mark.parametrize("name", loader.available())
def test_native_down_of_a_token_does_not_depend_on_the_batch(name: str) -> None:
    """Alone and among others, sums have one order: tokens of a request stay the same."""
    torch.manual_seed(0)
    x, rows = activations(4, 300, 0.9, torch.float32), torch.randn(300, 512)
    counts = torch.zeros(2, dtype=torch.int64)
    together = kernels(name).down(x, rows, None, counts)
    alone = torch.cat([kernels(name).down(row[None], rows, None, counts) for row in x])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", loader.available())
def test_native_down_of_other_layouts_is_refused(name: str) -> None:
    """It would read them wrongly."""
    rows, counts = torch.randn(8, 16), torch.zeros(2, dtype=torch.int64)
    for x, wrong in ((torch.ones(1, 8).bfloat16(), rows), (torch.ones(1, 16), rows.t())):
        with pytest.raises(ValueError, match="tokens of"):
            kernels(name).down(x, wrong, None, counts)
