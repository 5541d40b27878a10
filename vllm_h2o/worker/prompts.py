# SPDX-License-Identifier: Apache-2.0
"""Requests with more than one new token, or with survivors to pack, become prompt chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_h2o.kernels.batch import PromptChunk
from vllm_h2o.pages import num_pages
from vllm_h2o.policy import Term
from vllm_h2o.wire import RequestPlan


def own_blocks(plan: RequestPlan, row: torch.Tensor) -> torch.Tensor:
    """A row of the block table from the request's first block on, as long as it was."""
    return row.roll(-plan.first_block_idx) if plan.first_block_idx else row


@dataclass(frozen=True)
class Chunks:
    """Makes chunks of plans.

    Args:
        terms: the terms that are added when a chunk is stored.
        num_window_queries: queries at a prompt's end that a window term has.
        block_size: slots of a page.
        window_shape: layers and KV heads whose window scores a chunk may hold.
        scores_every_query: whether tokens can be ranked before the prompt's end. If they cannot, a
            chunk that is evicted from has a window at its own end.
        device: of those.

    """

    terms: Sequence[Term]
    num_window_queries: int
    block_size: int
    window_shape: tuple[int, int]
    scores_every_query: bool
    device: torch.device

    def of(self, plan: RequestPlan, table_row: torch.Tensor, start: int) -> PromptChunk:
        """The chunk of one request.

        Args:
            plan: of the request.
            table_row: [columns], int32: its row of the block table.
            start: row of its first token in the step's tensors.

        """
        num_new = plan.num_new
        # Drafts score when it is known which of them were accepted.
        waits = plan.fits or not plan.in_prompt
        alone = plan.packs_chunks and not self.scores_every_query
        window_end = plan.logical_end if alone else plan.prompt_end
        window = window_end - self.num_window_queries - plan.logical_start
        destination = window_scores = None
        if plan.pack_block_idx:
            num_blocks = num_pages(plan.held_end, self.block_size)
            destination = table_row[plan.pack_block_idx : plan.pack_block_idx + num_blocks]
            if self.terms and num_new > 1:
                shape = (*self.window_shape, plan.attended_len)
                window_scores = torch.empty(shape, dtype=torch.float32, device=self.device)
        return PromptChunk(
            tokens=slice(start, start + num_new),
            block_table=own_blocks(plan, table_row),
            resident_start=plan.resident_start,
            logical_start=plan.position_start,
            num_survivors=plan.num_survivors,
            recent_start=plan.recent_start,
            num_sinks=plan.budget.num_sinks,
            first_scoring_query=num_new if waits else 0,
            first_window_query=num_new if waits else min(max(window, 0), num_new),
            shift=num_new,
            destination_blocks=destination,
            splits=plan.splits,
            window_scores=window_scores,
        )

    def asked(self, prompts: Sequence[PromptChunk]) -> list[list[PromptChunk]]:
        """For each term, what its queries see: chunks, or blocks of them; nothing to reread yet."""
        return [
            []
            if term.queries == "reread"
            else [block for chunk in prompts for block in chunk.in_blocks(term, self.block_size)]
            for term in self.terms
        ]
