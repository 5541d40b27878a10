"""The four stages in plain torch: what runs where nothing faster does."""

from __future__ import annotations

from collections.abc import Sequence

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
from vllm_h2o.kernels.torch import decode, pack, prefill, scoring_pass
from vllm_h2o.kernels.torch.merge import merge_victims


class TorchKernels:
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
        token, initial = batch.field("token"), tensors.initial_score
        strips = decode.Strips.of(cache, batch)
        slot = decode.new_slots(batch, victims, strips)
        score = None if initial is None else initial[token]
        if scoring.merge:
            merge_victims(cache, batch, strips.rows, strips.length, slot, scoring.merge)
        decode.store(cache, batch, strips, slot, tensors.key[token], tensors.value[token], score)
        attending = (tensors.query[token], tensors.scale, scoring, tensors.sink_logits)
        out = decode.attend_and_score(cache, batch, strips, slot, *attending)
        tensors.out[token] = out.to(tensors.out.dtype)
        decode.select_victims(cache, batch, strips, victims, scoring)

    def prefill(
        self,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        tensors: StepTensors,
        scoring: Scoring,
    ) -> None:
        """Chunks of prompts, one by one."""
        for chunk in chunks:
            tokens, initial = chunk.tokens, tensors.initial_score
            score = None if initial is None else initial[tokens]
            prefill.store(cache, chunk, tensors.key[tokens], tensors.value[tokens], score)
            attending = (tensors.query[tokens], tensors.scale, scoring, tensors.sink_logits)
            out = prefill.attend_and_score(cache, chunk, *attending)
            tensors.out[tokens] = out.to(tensors.out.dtype)
        prefill.score_windows(cache, chunks, tensors, scoring)

    def score_pass(
        self,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        query: torch.Tensor,
        scale: float,
        which: ScoringPass,
        sink_logits: SinkLogits = None,
    ) -> None:
        """Chunk by chunk."""
        for chunk in chunks:
            scoring_pass.score(cache, chunk, query[chunk.tokens], scale, which, sink_logits)

    def pack_survivors(
        self, caches: Sequence[LayerCache], chunks: Sequence[PromptChunk], scoring: Scoring
    ) -> None:
        """Layer by layer."""
        for cache in caches:
            for chunk in chunks:
                pack.pack_survivors(cache, chunk, scoring)

    copy_survivors = staticmethod(pack.copy_survivors)
