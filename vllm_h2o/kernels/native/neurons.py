# SPDX-License-Identifier: Apache-2.0
"""The MLP of a ReLU model by neurons, in C++: functions of an open library."""

from __future__ import annotations

import ctypes

import torch

from vllm_h2o.kernels.coarse import Coarse
from vllm_h2o.kernels.native.layout import TYPES
from vllm_h2o.kernels.neurons import check_inputs


class NativeNeurons:
    """See :class:`vllm_h2o.kernels.neurons.NeuronKernels`.

    Args:
        variant: name of the instruction set that it was built for.
        library: opened by :mod:`~vllm_h2o.kernels.native.loader`.

    """

    def __init__(self, variant: str, library: ctypes.CDLL) -> None:
        self.name = f"native ({variant})"
        self._up, self._down = library.h2o_up, library.h2o_down
        self._up.restype = self._down.restype = ctypes.c_int64

    def up(
        self,
        x: torch.Tensor,
        rows: torch.Tensor,
        bias: torch.Tensor | None,
        coarse: Coarse,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """Multiply each token by the rows that it keeps; a row that several keep is read once."""
        y = x.new_empty(len(x), len(rows))
        copy = (coarse.codes, coarse.scales, coarse.cuts, y)
        used = self._up(
            *_inputs(x, rows, bias),
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in copy),
            *map(ctypes.c_int64, (len(x), *rows.shape)),
        )
        counts += torch.tensor([used, len(rows)])
        return y

    def down(
        self, x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, counts: torch.Tensor
    ) -> torch.Tensor:
        """Add up the rows that each token uses; a row that several use is read once."""
        y = x.new_empty(len(x), rows.shape[1])
        used = self._down(
            *_inputs(x, rows, bias),
            ctypes.c_void_p(y.data_ptr()),
            *map(ctypes.c_int64, (len(x), *rows.shape)),
        )
        counts += torch.tensor([used, len(rows)])
        return y


def _inputs(x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None) -> tuple[object, ...]:
    """Return type, tokens, their stride, rows and bias, as the functions take them."""
    check_inputs(x, rows, bias)
    return (
        ctypes.c_int32(TYPES[x.dtype]),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int64(x.stride(0)),
        ctypes.c_void_p(rows.data_ptr()),
        ctypes.c_void_p(None if bias is None else bias.data_ptr()),
    )
