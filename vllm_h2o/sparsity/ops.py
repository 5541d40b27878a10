# SPDX-License-Identifier: Apache-2.0
"""Operators that torch.compile does not look into: the number of tokens decides when they run."""

from __future__ import annotations

from functools import cache

import torch
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_h2o.kernels.coarse import Coarse
from vllm_h2o.kernels.native import loader
from vllm_h2o.kernels.native.neurons import NativeNeurons
from vllm_h2o.kernels.neurons import NeuronKernels
from vllm_h2o.kernels.torch.neurons import TorchNeurons


@cache
def kernels_of(device: str) -> NeuronKernels:
    """Return the fastest kernels that run on a kind of device: a CPU, or a GPU."""
    if device != "cpu":
        from vllm_h2o.kernels.triton.neurons import TritonNeurons

        return TritonNeurons()
    try:
        native = loader.load()
    except loader.NativeUnavailableError:
        return TorchNeurons()
    return NativeNeurons(native.variant, native.library)


def _up(
    x: torch.Tensor,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    cuts: torch.Tensor,
    counts: torch.Tensor,
    name: str,
    max_tokens: int,
) -> torch.Tensor:
    if 0 < len(x) <= max_tokens:
        return kernels_of(x.device.type).up(x, rows, bias, Coarse(codes, scales, cuts), counts)
    return torch.nn.functional.linear(x, rows, bias) if x.is_cuda else _whole(name, x, bias)


def _whole(name: str, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply as vLLM does, by the rearranged weight of a layer."""
    layer = get_forward_context().no_compile_layers[name]
    product: torch.Tensor = layer.cpu_linear(x, layer.weight, None if bias is None else layer.bias)
    return product


def _up_shape(x: torch.Tensor, rows: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape[0], rows.shape[0])


def _down(
    x: torch.Tensor,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    counts: torch.Tensor,
    name: str,
    max_tokens: int,
) -> torch.Tensor:
    if 0 < len(x) <= max_tokens:
        return kernels_of(x.device.type).down(x, rows, bias, counts)
    if not x.is_cuda:
        return _whole(name, x, bias)
    return x @ rows if bias is None else torch.addmm(bias, x, rows)


def _down_shape(x: torch.Tensor, rows: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape[0], rows.shape[1])  # len() would fix the number


direct_register_custom_op("h2o_mlp_up", _up, mutates_args=["counts"], fake_impl=_up_shape)
up = torch.ops.vllm.h2o_mlp_up
"""[tokens, width] by [neurons, width], plus bias; zero where a token leaves a neuron out."""
direct_register_custom_op("h2o_mlp_down", _down, mutates_args=["counts"], fake_impl=_down_shape)
down = torch.ops.vllm.h2o_mlp_down
"""[tokens, neurons] by [neurons, width], plus bias; sparse for up to ``max_tokens`` tokens."""
