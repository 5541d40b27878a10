# SPDX-License-Identifier: Apache-2.0
"""The stages in plain torch: what runs where nothing faster does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_h2o.kernels.batch import DecodeBatch, PromptChunk, Scoring, StepTensors
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.torch import decode, pack, prefill, terms
from vllm_h2o.kernels.torch.merge import merge_victims
from vllm_h2o.kernels.torch.rare import RareStages
from vllm_h2o.policy import Term


class TorchKernels(RareStages):
    """:class:`~vllm_h2o.kernels.interface.Kernels`, by copying pages together."""

    copies_kv = True

    def decode(
        self,
        cache: LayerCache,
        batch: DecodeBatch,
        victims: torch.Tensor,
        tensors: StepTensors,
        scoring: Scoring,
    ) -> None:
        """One new token of each request."""
        token = batch.field("token")
        strips = decode.Strips.of(cache, batch)
        slot = decode.new_slots(batch, victims, strips)
        if scoring.merge:
            merge_victims(cache, batch, strips.rows, strips.length, slot, scoring)
        decode.store(cache, batch, strips, slot, tensors.key[token], tensors.value[token])
        attending = (tensors.query[token], tensors.scale, scoring.power, tensors.sink_logits)
        out = decode.attend_and_score(cache, batch, strips, *attending)
        tensors.out[token] = out.to(tensors.out.dtype)
        decode.select_victims(cache, batch, strips, victims, scoring.by_age)

    def prefill(
        self,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        tensors: StepTensors,
        scoring: Scoring,
    ) -> None:
        """Chunks of prompts, one by one."""
        power = scoring.power if scoring.in_prompt else 0
        for chunk in chunks:
            tokens = chunk.tokens
            prefill.store(cache, chunk, tensors.key[tokens], tensors.value[tokens])
            attending = (tensors.query[tokens], tensors.scale, power, tensors.sink_logits)
            out = prefill.attend_and_score(cache, chunk, *attending)
            tensors.out[tokens] = out.to(tensors.out.dtype)

    def score_term(
        self,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        tensors: StepTensors,
        term: Term,
        by_age: bool,
    ) -> None:
        """Chunk by chunk."""
        own = terms.rotated(chunks, tensors, term)
        for chunk in chunks:
            terms.score_term(cache, chunk, own, term, by_age)

    def pack_survivors(
        self, caches: Sequence[LayerCache], chunks: Sequence[PromptChunk], scoring: Scoring
    ) -> None:
        """Layer by layer."""
        for cache in caches:
            for chunk in chunks:
                pack.pack_survivors(cache, chunk, scoring)

    copy_survivors = staticmethod(pack.copy_survivors)
