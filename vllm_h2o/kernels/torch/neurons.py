# SPDX-License-Identifier: Apache-2.0
"""The MLP of a ReLU model by neurons, in torch: on any device, gathered where a CPU reads it."""

from __future__ import annotations

import torch

from vllm_h2o.kernels.neurons import used_neurons


class TorchNeurons:
    """See :class:`vllm_h2o.kernels.neurons.NeuronKernels`."""

    name = "torch"

    def down(
        self, x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, counts: torch.Tensor
    ) -> torch.Tensor:
        """Gather the rows that any token uses, and multiply by them."""
        used = used_neurons(x).nonzero()[:, 0]
        counts += torch.tensor([len(used), len(rows)])
        y = x[:, used].float() @ rows[used].float()
        return (y if bias is None else y + bias.float()).to(x.dtype)
