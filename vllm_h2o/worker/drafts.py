# SPDX-License-Identifier: Apache-2.0
"""Queries of drafts, which score one step later: when it is known how many were accepted."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vllm_h2o.errors import IntegrityError
from vllm_h2o.kernels.batch import PromptChunk
from vllm_h2o.wire import RequestPlan
from vllm_h2o.worker.prompts import own_blocks

DraftQueries = dict[str, dict[str, torch.Tensor]]
"""Requests whose last step had drafts, by id: the queries of that step by layer, [T, Hq, D]."""


@dataclass
class Drafts:
    """The queries of drafts in one step.

    Args:
        drafted: rows of the step's tensors that are drafts and the token before them, and where
            each layer puts their queries, [T, Hq, D].
        accepted: accepted tokens of earlier steps, and the queries of those steps by layer: they
            score before this step's tokens are stored.

    """

    drafted: list[tuple[slice, dict[str, torch.Tensor]]] = field(default_factory=list)
    accepted: list[tuple[PromptChunk, dict[str, torch.Tensor]]] = field(default_factory=list)

    def add(
        self,
        kept: DraftQueries,
        request_id: str,
        plan: RequestPlan,
        table_row: torch.Tensor,
        start: int,
    ) -> None:
        """Enter one request: the drafts of its last step, and those of this one.

        Args:
            kept: queries of earlier steps; those of this one get their place there.
            request_id: the request.
            plan: of the request.
            table_row: [columns], int32: its row of the block table.
            start: row of its first token in the step's tensors.

        Raises:
            IntegrityError: when queries that score now were not kept.

        """
        queries, num = kept.pop(request_id, None), plan.num_unscored
        if plan.fits:
            return
        if num:
            if queries is None:
                raise IntegrityError(f"request {request_id}: the queries of its drafts are gone")
            chunk = PromptChunk(
                tokens=slice(0, num),
                block_table=own_blocks(plan, table_row),
                resident_start=plan.resident_start - num,
                logical_start=plan.logical_start - num,
            )
            self.accepted.append((chunk, queries))
        if plan.has_drafts:
            tokens = slice(start, start + plan.num_new)
            self.drafted.append((tokens, kept.setdefault(request_id, {})))
