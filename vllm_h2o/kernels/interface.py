"""What every set of kernels offers: the same four names, for whatever device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm_h2o.kernels.batch import DecodeBatch, PromptChunk, Scoring
from vllm_h2o.kernels.cache import Page


class Kernels(Protocol):
    """One implementation of the policy's attention.

    Tensors of a step have one row for each of its T tokens::

        query [T, Hq, D] | key, value [T, H, D] | out [T, Hq, D]          the model's dtype
        first [T, H] float32: what tokens' scores start with; None: zero
        victims [num_blocks, H] int32: slots of the victims, by their request's first block

    """

    gathers: bool
    """Whether K of a whole decode batch is copied: batches are then of about one length."""

    def decode(
        self,
        page: Page,
        batch: DecodeBatch,
        victims: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        first: torch.Tensor | None,
        scale: float,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        """Store one new token of each request, attend and score, select the next victims.

        Args:
            page: written: the new tokens, scores.
            batch: the requests.
            victims: read where a token overwrites, written where one is selected.
            query: of the step.
            key: of the step.
            value: of the step.
            first: of the step.
            scale: of the logits.
            scoring: what is added to scores, and what is ranked.
            out: written, in the rows of the batch's tokens.

        """

    def prefill(
        self,
        page: Page,
        chunks: Sequence[PromptChunk],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        first: torch.Tensor | None,
        scale: float,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        """Store chunks of prompts behind the slots in use, attend causally and score.

        Args:
            page: written: the new tokens, scores.
            chunks: the chunks, of different requests.
            query: of the step.
            key: of the step.
            value: of the step.
            first: of the step.
            scale: of the logits.
            scoring: what is added to scores.
            out: written, in the rows of the chunks' tokens.

        """

    def replay(
        self,
        page: Page,
        chunks: Sequence[PromptChunk],
        again: torch.Tensor,
        scale: float,
        scoring: Scoring,
    ) -> None:
        """Score the chunks' tokens by their queries, asked again from behind them.

        Args:
            page: the chunks are stored; scores are written.
            chunks: the chunks; queries that score are asked.
            again: [T, Hq, D], the step's queries; a chunk's are turned as many positions onwards as
                it has tokens.
            scale: of the logits.
            scoring: the power of what is added.

        """

    def pack_survivors(
        self, pages: Sequence[Page], chunks: Sequence[PromptChunk], scoring: Scoring
    ) -> None:
        """Move the ``keep`` survivors of each KV head into slots [0, keep), in order of position.

        Args:
            pages: of every layer; rewritten in place.
            chunks: those that keep fewer tokens than they hold, in the pages that these are in.
            scoring: what is ranked.

        """
