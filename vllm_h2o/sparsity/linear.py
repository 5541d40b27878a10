# SPDX-License-Identifier: Apache-2.0
"""The linear methods: checkpoints load as ever; the MLP is then stored by neurons.

On a CPU vLLM multiplies by weights that it has rearranged. These lie beside, for steps that read
every row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from vllm_h2o.kernels.coarse import coarsen
from vllm_h2o.sparsity.ops import down, up


@dataclass(frozen=True)
class Place:
    """Finds a layer's rearranged weight, and its counts, while the model runs.

    Args:
        name: the layer's; "" where nothing is rearranged, so that all layers have one graph.
        layers: vLLM's layers by name, which a forward pass knows.
        counts: int64 [2], rows read and rows there; a reloaded layer goes on with them.

    """

    name: str
    layers: dict[str, Any]
    counts: torch.Tensor


class Sparse(UnquantizedLinearMethod):
    """The common part of the linear methods of both matrices.

    Args:
        max_tokens: steps with more tokens read every row.
        place: of the layer.

    """

    supports_pre_processed_weights = False

    def __init__(self, max_tokens: int, place: Place) -> None:
        super().__init__()
        self._max_tokens, self._place = max_tokens, place

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Store the weight by neurons, and get ready to serve."""
        if self._place.name:
            self._rearrange(layer)
        width = layer.get_parameter("weight").shape[1]
        self._store(layer)
        layer.register_buffer("counts", self._place.counts, persistent=False)
        if not self._place.name:
            self._rehearse(layer, width)

    def _store(self, layer: torch.nn.Module) -> None:
        """Store a loaded weight, [out, in], as steps of few tokens read it."""
        raise NotImplementedError

    def _rearrange(self, layer: torch.nn.Module) -> None:
        """Put the weight beside as vLLM multiplies by it; on a GPU that is as it is."""
        whole, bias = torch.nn.Module(), _bias(layer)
        whole.weight = layer.get_parameter("weight")
        own = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
        whole.register_parameter("bias", own)
        dispatch_cpu_unquantized_gemm(whole, remove_weight=True)
        self._place.layers[self._place.name] = whole

    def _rehearse(self, layer: torch.nn.Module, width: int) -> None:
        """Have a GPU's kernels compiled before it serves; what they read is not counted."""
        weight = layer.get_parameter("weight")
        for tokens in range(1, self._max_tokens + 1):
            x = torch.zeros(tokens, width, dtype=weight.dtype, device=weight.device)
            self.apply(layer, x, layer.bias)
        self._place.counts.zero_()


class SparseUp(Sparse):
    """The linear method of fc1: rows that a 4-bit copy leaves out in every token are not read.

    What a token leaves out is zero, so that fc2 leaves it out as well.

    Args:
        max_tokens: steps with more tokens read every row.
        place: of the layer.
        recall: share of the positive products to keep, in (0, 1).

    """

    def __init__(self, max_tokens: int, place: Place, recall: float) -> None:
        super().__init__(max_tokens, place)
        self._recall = recall

    def _store(self, layer: torch.nn.Module) -> None:
        """Leave it by neurons, as it comes, and copy it in 4 bits."""
        coarse = coarsen(layer.get_parameter("weight").data, _bias(layer), self._recall)
        for name, part in vars(coarse).items():
            layer.register_buffer(name, part)  # persistent: else a reload would keep the old one

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
        return up(x, layer.weight, bias, *copy, layer.counts, self._place.name, self._max_tokens)


class SparseDown(Sparse):
    """The linear method of fc2: rows whose input is zero in every token are not read."""

    def _store(self, layer: torch.nn.Module) -> None:
        """Store it by neurons: [neurons, width]."""
        rows = layer.get_parameter("weight").data.t().contiguous()
        layer.weight = torch.nn.Parameter(rows, requires_grad=False)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply tokens by the weight.

        Args:
            layer: fc2.
            x: [tokens, neurons], after ReLU.
            bias: [width], or None.

        """
        return down(x, layer.weight, bias, layer.counts, self._place.name, self._max_tokens)


def _bias(layer: torch.nn.Module) -> torch.Tensor | None:
    return None if layer.bias is None else layer.get_parameter("bias").data
