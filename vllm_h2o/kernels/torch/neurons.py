# SPDX-License-Identifier: Apache-2.0
"""The MLP of a ReLU model by neurons, in torch: on any device, gathered where a CPU reads it."""

from __future__ import annotations

import torch

from vllm_h2o.kernels.coarse import Coarse, kept
from vllm_h2o.kernels.neurons import used_neurons


class TorchNeurons:
    """See :class:`vllm_h2o.kernels.neurons.NeuronKernels`."""

    name = "torch"

    def up(
        self,
        x: torch.Tensor,
        rows: torch.Tensor,
        bias: torch.Tensor | None,
        coarse: Coarse,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """Gather the rows that any token keeps, and multiply by them."""
        keeps = kept(x, bias, coarse)[:, : len(rows)]
        used = keeps.any(0).nonzero()[:, 0]
        counts += counts.new_tensor([len(used), len(rows)])
        products = x.float() @ rows[used].float().t()
        products = products if bias is None else products + bias[used].float()
        y = x.new_zeros(len(x), len(rows))
        y[:, used] = products.where(keeps[:, used], 0).to(x.dtype)
        return y

    def down(
        self, x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, counts: torch.Tensor
    ) -> torch.Tensor:
        """Gather the rows that any token uses, and multiply by them."""
        used = used_neurons(x).nonzero()[:, 0]
        counts += counts.new_tensor([len(used), len(rows)])
        y = x[:, used].float() @ rows[used].float()
        return (y if bias is None else y + bias.float()).to(x.dtype)
