# SPDX-License-Identifier: Apache-2.0
"""Define the MLP of a ReLU model by neurons, for up to a few tokens; C++ and torch are twins.

A neuron i is a row of the first matrix, which computes it, and a row of the second, which it
weighs::

    a[t, i] = relu(up[i] . x[t] + up_bias[i])
    y[t]    = down_bias + sum of a[t, i] * down[i], over i with a[t, i] != 0      (Deja Vu, eq. 1)

A row of ``down`` that no token uses is not read. A row of ``up`` is not read where its estimate
(coarse.py) is so far below zero that it is hardly used. All sums are of float32.
"""

from __future__ import annotations

from typing import Protocol

import torch

from vllm_h2o.kernels.coarse import Coarse, kept

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of tokens and rows."""


class NeuronKernels(Protocol):
    """The stages that a device computes; rows and tokens have one dtype."""

    name: str

    def up(
        self,
        x: torch.Tensor,
        rows: torch.Tensor,
        bias: torch.Tensor | None,
        coarse: Coarse,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """See :func:`up`.

        Args:
            x: [tokens, width].
            rows: [neurons, width].
            bias: [neurons], or None.
            coarse: the copy of ``rows``.
            counts: [2] of int64, which grows by the rows read and the rows there.

        """
        ...

    def down(
        self, x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, counts: torch.Tensor
    ) -> torch.Tensor:
        """See :func:`down`.

        Args:
            x: [tokens, neurons].
            rows: [neurons, width].
            bias: [width], or None.
            counts: [2] of int64, which grows by the rows read and the rows there.

        """
        ...


def up(
    x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, coarse: Coarse
) -> torch.Tensor:
    """Return each token's products with the rows that it keeps, and zero for the others.

    Args:
        x: [tokens, width].
        rows: [neurons, width].
        bias: [neurons], or None.
        coarse: the copy of ``rows``, which estimates the products.

    """
    y = x.float() @ rows.float().t()
    y = y if bias is None else y + bias.float()
    return y.where(kept(x, bias, coarse)[:, : len(rows)], 0).to(x.dtype)


def down(x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the sum of the rows that each token uses, one row after the other.

    Args:
        x: [tokens, neurons], zero where a token does not use a neuron.
        rows: [neurons, width].
        bias: [width], or None.

    """
    start = rows.new_zeros(rows.shape[1]) if bias is None else bias
    y = start.float().repeat(len(x), 1)
    for token in range(len(x)):
        for neuron in x[token].nonzero()[:, 0].tolist():
            y[token] += x[token, neuron].float() * rows[neuron].float()
    return y.to(x.dtype)


def check_inputs(x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Refuse a dtype or layout that kernels would read wrongly.

    Raises:
        ValueError: for tokens of no such dtype, or another than rows or bias, or for rows that do
            not lie together.

    """
    alike = x.dtype == rows.dtype and (bias is None or bias.dtype == x.dtype)
    if not alike or x.dtype not in DTYPES or x.stride(1) != 1 or not rows.is_contiguous():
        raise ValueError(f"tokens of {x.dtype} {x.stride()}, rows of {rows.dtype} {rows.stride()}")


def used_neurons(x: torch.Tensor) -> torch.Tensor:
    """Return which neurons any token uses, as booleans: those whose rows a step reads."""
    return (x != 0).any(0)
