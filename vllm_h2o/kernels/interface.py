"""What every set of kernels offers: the same four stages, for whatever device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm_h2o.kernels.batch import (
    DecodeBatch,
    PromptChunk,
    Scoring,
    ScoringPass,
    StepTensors,
)
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.sinks import SinkLogits


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
            scoring: what is added to scores, and what is ranked; whether victims are merged.

        """

    def prefill(
        self,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        tensors: StepTensors,
        scoring: Scoring,
    ) -> None:
        """Store chunks of prompts after the slots in use, attend causally, score.

        Args:
            cache: written: the new tokens, scores.
            chunks: of different requests; ``window_scores``, where there are any, are written.
            tensors: ``out`` is written in the rows of the chunks' tokens.
            scoring: what is added to scores.

        """

    def score_pass(
        self,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        query: torch.Tensor,
        scale: float,
        which: ScoringPass,
        sink_logits: SinkLogits = None,
    ) -> None:
        """Score tokens up to each chunk's end once more.

        Args:
            cache: the chunks are stored; scores are written.
            chunks: their queries that score in this pass are used.
            query: [T, Hq, D], the step's queries; in a rotated pass, a chunk's are as many
                positions further as it has tokens.
            scale: of the logits.
            which: which queries score, and what.
            sink_logits: [Hq], float32, of the layer's attention sinks.

        """

    def pack_survivors(
        self, caches: Sequence[LayerCache], chunks: Sequence[PromptChunk], scoring: Scoring
    ) -> None:
        """Move each KV head's survivors into slots [0, num_survivors), in order of position.

        Args:
            caches: of every layer; rewritten in place.
            chunks: those with survivors, which stay in their own blocks.
            scoring: what is ranked.

        """

    def copy_survivors(
        self,
        caches: Sequence[LayerCache],
        chunk: PromptChunk,
        scoring: Scoring,
        scores: torch.Tensor,
    ) -> None:
        """Copy each KV head's survivors out of pages that others read.

        Args:
            caches: of some layers; written in the blocks ``chunk.destination_blocks``.
            chunk: with survivors.
            scoring: what is ranked.
            scores: [len(caches), H, attended_len], float32: of all slots; may be overwritten.

        """
