# SPDX-License-Identifier: Apache-2.0
"""Operators that torch.compile does not look into: the number of tokens decides when they run."""

from __future__ import annotations

from functools import cache

import torch
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_h2o.kernels.coarse import Coarse
from vllm_h2o.kernels.native import loader
from vllm_h2o.kernels.native.neurons import NativeNeurons
from vllm_h2o.kernels.neurons import NeuronKernels
from vllm_h2o.kernels.torch.neurons import TorchNeurons

MOST_TURNED = 256
"""Most tokens of a step by which rows of float32 are multiplied, not the other way round. For 16 to
128 of them torch then took 0.5 to 0.8 times as long (MKL, AVX2, 8,192 rows of 2,048)."""


@cache
def kernels_of(device: str) -> NeuronKernels:
    """Return the fastest kernels that run on a kind of device."""
    if device == "cpu":
        try:
            native = loader.load()
        except loader.NativeUnavailableError:
            return TorchNeurons()
        return NativeNeurons(native.variant, native.library)
    return TorchNeurons()


def _up(
    x: torch.Tensor,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    cuts: torch.Tensor,
    counts: torch.Tensor,
    max_tokens: int,
) -> torch.Tensor:
    if 0 < len(x) <= max_tokens:
        return kernels_of(x.device.type).up(x, rows, bias, Coarse(codes, scales, cuts), counts)
    if x.dtype == torch.float32 and len(x) <= MOST_TURNED:
        y = rows @ x.t() if bias is None else torch.addmm(bias[:, None], rows, x.t())
        return y.t().contiguous()
    return torch.nn.functional.linear(x, rows, bias)


def _up_shape(x: torch.Tensor, rows: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape[0], rows.shape[0])


def _down(
    x: torch.Tensor,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    counts: torch.Tensor,
    max_tokens: int,
) -> torch.Tensor:
    if 0 < len(x) <= max_tokens:
        return kernels_of(x.device.type).down(x, rows, bias, counts)
    return x @ rows if bias is None else torch.addmm(bias, x, rows)


def _down_shape(x: torch.Tensor, rows: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape[0], rows.shape[1])  # len() would fix the number


direct_register_custom_op("h2o_mlp_up", _up, mutates_args=["counts"], fake_impl=_up_shape)
up = torch.ops.vllm.h2o_mlp_up
"""[tokens, width] by [neurons, width], plus bias; zero where a token leaves a neuron out."""
direct_register_custom_op("h2o_mlp_down", _down, mutates_args=["counts"], fake_impl=_down_shape)
down = torch.ops.vllm.h2o_mlp_down
"""[tokens, neurons] by [neurons, width], plus bias; sparse for up to ``max_tokens`` tokens."""
