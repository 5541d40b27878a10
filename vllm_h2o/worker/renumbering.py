"""Positions that roll: counted anew among what is resident, when a step would run out of them.

The model's rotary embedding and the kernels see positions of the plan, vLLM everything else of a
token by its index: both model runners hand the step's positions to the builder of attention
metadata after they have found token ids and slots by them, and before the model reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_h2o.errors import IntegrityError
from vllm_h2o.kernels.torch.renumber import renumber
from vllm_h2o.wire import RequestPlan
from vllm_h2o.worker.reconstruction import sent


@dataclass(frozen=True)
class Renumbering:
    """One request, before the forward pass of the step that its plan is of.

    Args:
        plan: that step's.
        blocks: [P], int32: those that hold the request's slots.
        layer_names: of the group's layers.
        layers: vLLM's attention layers, by name.

    """

    plan: RequestPlan
    blocks: torch.Tensor
    layer_names: Sequence[str]
    layers: Mapping[str, Any]

    def run(self, accumulates: bool) -> None:
        """Give its tokens positions by rank, in every layer and KV head.

        Args:
            accumulates: whether scores are of attention, as sums or means.

        Raises:
            IntegrityError: when nothing rotates a layer's keys.

        """
        held = (self.plan.resident_start, self.plan.renumbers_from)
        for name in self.layer_names:
            layer = self.layers[name]
            if layer.impl.rotate_back is None:
                raise IntegrityError(f"positions roll, and nothing rotates the keys of {name}")
            cache = layer.impl.cache_of(layer.kv_cache)
            renumber(cache, self.blocks, *held, layer.impl.rotate_back, accumulates)


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
