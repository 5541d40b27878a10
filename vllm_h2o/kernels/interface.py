# SPDX-License-Identifier: Apache-2.0
"""Every stage that the worker asks of a set of kernels, whatever the device.

The first five are where time goes: each set has its own. The others are rare, once in a prompt or a
turn: :class:`~vllm_h2o.kernels.torch.rare.RareStages` has them for all sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm_h2o.kernels.batch import DecodeBatch, PromptChunk, Scoring, StepTensors
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.strip import Rotation
from vllm_h2o.policy import Term


class Kernels(Protocol):
    """One implementation of the policy's attention."""

    copies_kv: bool
    """Whether K and V of a decode batch are copied: its requests should be of about one length."""

    def decode(
        self,
        cache: LayerCache,
        batch: DecodeBatch,
        victims: torch.Tensor,
        tensors: StepTensors,
        scoring: Scoring,
    ) -> None:
        """Store one new token of each request, attend, score, select the next victims.

        Where victims are merged, each goes to the nearest key before the new token is stored.

        Args:
            cache: written: the new tokens, scores, and what takes victims in.
            batch: the requests.
            victims: [num_blocks, H], int32: slots of the victims, by their request's first block;
                read where a token overwrites, written where a victim is selected.
            tensors: ``out`` is written in the rows of the batch's tokens.
            scoring: what is added to scores, and how they are ranked; whether victims are merged.

        """

    def prefill(
        self,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        tensors: StepTensors,
        scoring: Scoring,
    ) -> torch.Tensor | None:
        """Store chunks of prompts after the slots in use, attend causally, score.

        Queries from ``first_scoring_query`` on add to the pages' scores.

        Args:
            cache: written: the new tokens, scores.
            chunks: of different requests.
            tensors: ``out`` is written in the rows of the chunks' tokens.
            scoring: what is added to scores.

        Returns:
            :attr:`StepTensors.lse` of the chunks' tokens; None where it is not kept.

        """

    def score_term(
        self,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        tensors: StepTensors,
        term: Term,
        by_age: bool,
    ) -> None:
        """Add one term of a ranking to the scores of tokens up to each chunk's end.

        ``score[j] += weight * (age[j] if by_age else 1) * value[j]``: see policy/ranking.py. Of a
        chunk with ``window_scores``, the right side is stored there instead, at ``layer_index``.
        Of a term with a lifetime each token's score without it is kept before, in the cache's
        ``score_without_window``, if it has any.

        Args:
            cache: the chunks are stored; scores are written.
            chunks: their queries from ``first_query(term)`` on are used. Those of a rotated or
                reread term see all slots of the chunk's table, others see slots up to their own.
            tensors: all but keys, values and ``out`` are read.
            term: which of ``sum`` and ``max``, and its numbers.
            by_age: whether scores are ranked as means.

        """

    def pack_survivors(
        self, caches: Sequence[LayerCache], chunks: Sequence[PromptChunk], scoring: Scoring
    ) -> None:
        """Move each KV head's survivors into slots [0, num_survivors), in order of position.

        Args:
            caches: of every layer; rewritten in place.
            chunks: those with survivors, which stay in their own blocks.
            scoring: how scores are ranked, and whether by whole pages.

        """

    def copy_survivors(
        self,
        caches: Sequence[LayerCache],
        chunk: PromptChunk,
        scoring: Scoring,
        scores: torch.Tensor,
    ) -> None:
        """Copy each KV head's survivors out of pages that other requests read.

        Args:
            caches: of some layers; written in the blocks ``chunk.destination_blocks``.
            chunk: with survivors.
            scoring: how scores are ranked.
            scores: [len(caches), H, attended_len], float32: of all slots; may be overwritten.

        """

    def restore_scores(
        self, cache: LayerCache, blocks: torch.Tensor, prompt_ends: torch.Tensor
    ) -> None:
        """When a term's lifetime is over: give the tokens of prompts the scores without it.

        Args:
            cache: scores are written.
            blocks: [P], integers: of some requests.
            prompt_ends: [P], integers: tokens of the prompt, of each block's request.

        """

    def renumber(
        self,
        cache: LayerCache,
        blocks: torch.Tensor,
        num_slots: int,
        end: int,
        rotate_back: Rotation,
        accumulates: bool = False,
    ) -> None:
        """Give the tokens of one request positions [0, num_slots) in each KV head, in their order.

        Args:
            cache: K, positions and, with ``accumulates``, scores are written.
            blocks: [P], integers: the blocks that hold the request's slots.
            num_slots: slots in use.
            end: one past the position of the newest token, before.
            rotate_back: what the layer's rotary embedding makes of a key some positions earlier.
            accumulates: whether scores are of attention: a token keeps its score per query.

        """
