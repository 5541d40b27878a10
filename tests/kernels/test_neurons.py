# SPDX-License-Identifier: Apache-2.0
"""The kernels of a ReLU model's MLP by neurons compute what the reference does."""

from __future__ import annotations

from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import drawn
from vllm_h2o.kernels import neurons
from vllm_h2o.kernels.coarse import Coarse, coarsen, estimates, kept
from vllm_h2o.kernels.native import loader
from vllm_h2o.kernels.native.neurons import NativeNeurons
from vllm_h2o.kernels.neurons import NeuronKernels
from vllm_h2o.kernels.torch.neurons import TorchNeurons
from vllm_h2o.kernels.triton.neurons import TritonNeurons

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def kernels(name: str) -> NeuronKernels:
    """Torch's, Triton's, or the variant of the C++ kernels with this name."""
    if name in OTHERS:
        return OTHERS[name]()
    native = loader.load(name)
    return NativeNeurons(native.variant, native.library)


OTHERS = {"torch": TorchNeurons, "triton": TritonNeurons}
NAMES = [*OTHERS, *loader.available()]


def skip_where_interpreted(name: str, dtype: torch.dtype) -> None:
    """Skip what the interpreter cannot do."""
    if name == "triton" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies no matrices of bfloat16")


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
    skip_where_interpreted(name, dtype)
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


@pytest.mark.parametrize("name", ["triton", *loader.available()])
def test_down_of_other_layouts_is_refused(name: str) -> None:
    """It would read them wrongly."""
    rows, counts = torch.randn(8, 16), torch.zeros(2, dtype=torch.int64)
    for x, wrong in (
        (torch.ones(1, 8).bfloat16(), rows),
        (torch.ones(1, 16), rows.t()),
        (torch.ones(1, 8).double(), rows.double()),
    ):
        with pytest.raises(ValueError, match="tokens of"):
            kernels(name).down(x, wrong, None, counts)


def layer(
    count: int, width: int, zeros: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, Coarse]:
    """Random rows, a bias with which this share of products is below zero, and the copy."""
    rows = (0.02 * torch.randn(count, width)).to(dtype)
    level = NormalDist().inv_cdf(min(max(zeros, 1e-9), 1 - 1e-9))
    bias = torch.full((count,), -level * 0.02 * width**0.5).to(dtype)
    return rows, bias, coarsen(rows, bias, 0.99)


def assert_up_equals_the_reference(
    name: str, x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, coarse: Coarse
) -> None:
    """But for neurons whose estimates are at the cut, where sums of another order decide."""
    counts = torch.zeros(2, dtype=torch.int64)
    y = kernels(name).up(x, rows, bias, coarse, counts)
    wanted = neurons.up(x, rows, bias, coarse)
    cuts = coarse.cuts * x.float().norm(dim=1, keepdim=True)
    above = (estimates(x, bias, coarse) + cuts)[:, : len(rows)]
    decided = above.abs() > 1e-3 * cuts[:, : len(rows)].clamp_min(1e-6)
    assert y.dtype == x.dtype and y.shape == wanted.shape
    scale = ROUNDING[x.dtype] * wanted.float().abs().max().item() + 1e-6
    torch.testing.assert_close(y[decided], wanted[decided], rtol=1e-2, atol=scale)
    used = (kept(x, bias, coarse)[:, : len(rows)]).any(0)
    undecided = int((~decided).any(0).sum())
    assert abs(counts[0].item() - int(used.sum())) <= undecided <= 2 + 0.01 * y.numel()
    assert counts[1] == len(rows)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.95, 1.0])
def test_up_equals_the_reference(name: str, dtype: torch.dtype, zeros: float) -> None:
    """Whole blocks and groups, and parts of them; tokens in fours and others."""
    skip_where_interpreted(name, dtype)
    torch.manual_seed(0)
    for tokens, count, width in ((1, 256, 128), (3, 100, 64), (8, 64, 200), (6, 17, 36)):
        rows, bias, coarse = layer(count, width, zeros, dtype)
        x = torch.randn(tokens, width).to(dtype)
        assert_up_equals_the_reference(name, x, rows, bias, coarse)


@pytest.mark.parametrize("name", NAMES)
@given(
    tokens=st.integers(1, 32),
    count=st.integers(1, 70),
    width=st.integers(1, 200),
    has_bias=st.booleans(),
    outlier=st.sampled_from([1.0, 50.0]),
    seed=st.integers(0, 99),
)
@drawn(100)
def test_up_of_any_shape_equals_the_reference(
    name: str, tokens: int, count: int, width: int, has_bias: bool, outlier: float, seed: int
) -> None:
    """With and without a bias, and with a column that is far larger than others."""
    torch.manual_seed(seed)
    rows, bias, coarse = layer(count, width, 0.8, torch.float32)
    x = torch.randn(tokens, width + 3)[:, 3:]  # a part of wider rows
    x[:, 0] *= outlier
    assert_up_equals_the_reference(name, x, rows, bias if has_bias else None, coarse)


@pytest.mark.parametrize("name", NAMES)
def test_up_reads_no_row_that_is_left_out(name: str) -> None:
    """A row of NaN is not there for a token that does not keep it; a NaN of a token is not lost."""
    torch.manual_seed(0)
    rows, bias, coarse = layer(64, 64, 0.9, torch.float32)
    x, counts = torch.randn(2, 64), torch.zeros(2, dtype=torch.int64)
    keeps = kept(x, bias, coarse)
    rows[~keeps.any(0)] = float("nan")
    assert kernels(name).up(x, rows, bias, coarse, counts).isfinite().all()
    x[1, 5] = float("nan")
    y = kernels(name).up(x, rows, bias, coarse, counts)
    assert y[0].isfinite().all() and y[1].isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_up_of_zeros_is_the_bias(name: str) -> None:
    """Where it is above zero: a step that vLLM runs to warm up has no norm."""
    rows, bias, coarse = layer(32, 64, 0.5, torch.float32)
    bias = torch.linspace(-1, 1, 32)
    y = kernels(name).up(torch.zeros(1, 64), rows, bias, coarse, torch.zeros(2, dtype=torch.int64))
    assert torch.equal(y[0], bias.clamp_min(0))
