# SPDX-License-Identifier: Apache-2.0
"""Positions that roll: counted anew among what is resident, when a step would run out of them.

The model's rotary embedding and the kernels see positions of the plan, vLLM everything else of a
token by its index: both model runners hand the step's positions to the builder of attention
metadata after they have found token ids and slots by them, and before the model reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_h2o.errors import IntegrityError
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.wire import RequestPlan
from vllm_h2o.worker.after_step import Layers
from vllm_h2o.worker.reconstruction import sent


def renumber(
    plan: RequestPlan, blocks: torch.Tensor, layers: Layers, kernels: Kernels, accumulates: bool
) -> None:
    """Give the tokens of one request positions by rank, in every layer and KV head.

    Args:
        plan: of the step that needs it.
        blocks: [P], int32: the blocks that hold the request's slots.
        layers: whose caches hold them.
        kernels: what renumbers.
        accumulates: whether scores are of attention, as sums or means.

    Raises:
        IntegrityError: when nothing rotates a layer's keys.

    """
    held = (plan.resident_start, plan.renumbers_from)
    for name, cache in zip(layers.names, layers.caches(), strict=True):
        rope_back = layers.context[name].impl.rope_back
        if rope_back is None:
            raise IntegrityError(f"positions roll, and nothing rotates the keys of {name}")
        kernels.renumber(cache, blocks, *held, rope_back, accumulates)


@dataclass(frozen=True)
class Rolled:
    """The positions of a step's tokens, while the model reads them.

    Args:
        positions: [T], int64: the model runner's own, of the step's tokens.
        offsets: [T], int64: what was taken off them.

    """

    positions: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    @torch.inference_mode()
    def of(
        cls, plans: Sequence[RequestPlan], positions: torch.Tensor | None, limit: int
    ) -> Rolled | None:
        """Take each request's offset off the positions of its tokens.

        Args:
            plans: of the batch, in its order.
            positions: [num_tokens], int64, written: the model runner's own, at first indices; after
                those of the batch, of padding.
            limit: one past the last position that a query may have.

        Returns:
            What gives them back; None where no offset is above 0.

        Raises:
            IntegrityError: when a query would have a position that the model does not know, or the
                runner has positions of its own, or none.

        """
        for plan in plans:
            if plan.position_end > limit:
                raise IntegrityError(
                    f"a query would have position {plan.position_end - 1}, and there are {limit}"
                )
        if positions is not None:
            # Rows of padding keep what a step before had there: an index, past the model's table.
            positions[sum(plan.num_new for plan in plans) :].zero_()
        if not any(plan.offset for plan in plans):
            return None
        if positions is None:
            raise IntegrityError("positions roll, and the model runner does not hand them over")
        offsets = torch.tensor([plan.offset for plan in plans])
        lengths = torch.tensor([plan.num_new for plan in plans])
        each = sent(offsets.repeat_interleave(lengths), positions.device)
        own = positions[: len(each)]
        # A liberty: the model runner's tensor is written to, until the forward pass is through.
        own.sub_(each)
        rolled = cls(own, each)
        if not positions.is_cuda:  # where looking costs nothing
            rolled.check(plans)
        return rolled

    def check(self, plans: Sequence[RequestPlan]) -> None:
        """Compare each request's positions with its plan.

        Raises:
            IntegrityError: when they are others.

        """
        wanted = [range(plan.position_start, plan.position_end) for plan in plans]
        if self.positions.tolist() != [position for each in wanted for position in each]:
            raise IntegrityError(
                f"the step's tokens have positions {self.positions.tolist()}, the plans say "
                f"{wanted}"
            )

    @torch.inference_mode()
    def run(self) -> None:
        """After the forward pass: indices again, which sampling may read."""
        self.positions.add_(self.offsets)
