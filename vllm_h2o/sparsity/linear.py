# SPDX-License-Identifier: Apache-2.0
"""The linear methods: checkpoints load as ever; the MLP is then stored by neurons."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from vllm_h2o.kernels.coarse import coarsen
from vllm_h2o.sparsity.ops import down, up


class SparseUp(UnquantizedLinearMethod):
    """The linear method of fc1: rows that a 4-bit copy leaves out in every token are not read.

    What a token leaves out is zero, so that fc2 leaves it out as well.

    Args:
        max_tokens: steps with more tokens read every row.
        recall: share of the positive products to keep, in (0, 1).

    """

    supports_pre_processed_weights = False

    def __init__(self, max_tokens: int, recall: float) -> None:
        super().__init__()
        self._max_tokens, self._recall = max_tokens, recall

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Copy the weight, [neurons, width], in 4 bits."""
        bias = None if layer.bias is None else layer.get_parameter("bias").data
        coarse = coarsen(layer.get_parameter("weight").data, bias, self._recall)
        for name, part in vars(coarse).items():
            layer.register_buffer(name, part, persistent=False)
        _add_counts(layer)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply tokens by the weight.

        Args:
            layer: fc1.
            x: [tokens, width].
            bias: [neurons], or None.

        """
        copy = (layer.codes, layer.scales, layer.cuts)
        return up(x, layer.weight, bias, *copy, layer.counts, self._max_tokens)


class SparseDown(UnquantizedLinearMethod):
    """The linear method of fc2: rows whose input is zero in every token are not read.

    Args:
        max_tokens: steps with more tokens read every row.

    """

    supports_pre_processed_weights = False

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self._max_tokens = max_tokens

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Store the weight by neurons: [neurons, width]."""
        rows = layer.get_parameter("weight").data.t().contiguous()
        layer.weight = torch.nn.Parameter(rows, requires_grad=False)
        _add_counts(layer)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply tokens by the weight.

        Args:
            layer: fc2.
            x: [tokens, neurons], after ReLU.
            bias: [width], or None.

        """
        return down(x, layer.weight, bias, layer.counts, self._max_tokens)


def _add_counts(layer: torch.nn.Module) -> None:
    """Count rows read and rows there, of this rank."""
    layer.register_buffer("counts", torch.zeros(2, dtype=torch.int64), persistent=False)
