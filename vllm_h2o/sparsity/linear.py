# SPDX-License-Identifier: Apache-2.0
"""The linear methods: checkpoints load as ever, and fc2 is then stored by neurons."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from vllm_h2o.sparsity.ops import down


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
        # Rows read, rows there: of this rank.
        layer.register_buffer("counts", torch.zeros(2, dtype=torch.int64), persistent=False)

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
