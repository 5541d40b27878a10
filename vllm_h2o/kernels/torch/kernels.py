"""The four names in plain torch: what runs where nothing faster does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_h2o.kernels.batch import DecodeBatch, PromptChunk, Scoring
from vllm_h2o.kernels.cache import Page
from vllm_h2o.kernels.torch import decode
from vllm_h2o.kernels.torch import prefill as prompt
from vllm_h2o.kernels.torch.pack import pack_survivors, replay


class TorchKernels:
    """:class:`~vllm_h2o.kernels.interface.Kernels`, by gathering pages."""

    gathers = True

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
        """One new token of each request."""
        token = batch.order("token")
        slot = decode.new_slots(batch, victims)
        score = None if first is None else first[token]
        decode.store(page, batch, slot, key[token], value[token], score)
        attended = decode.attend_and_score(page, batch, slot, query[token], scale, scoring)
        out[token] = attended.to(out.dtype)
        decode.select_victims(page, batch, victims, scoring)

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
        """Chunks of prompts, one by one."""
        for chunk in chunks:
            tokens = chunk.tokens
            score = None if first is None else first[tokens]
            prompt.store(page, chunk, key[tokens], value[tokens], score)
            attended = prompt.attend_and_score(page, chunk, query[tokens], scale, scoring)
            out[tokens] = attended.to(out.dtype)

    def replay(
        self,
        page: Page,
        chunks: Sequence[PromptChunk],
        again: torch.Tensor,
        scale: float,
        scoring: Scoring,
    ) -> None:
        """Chunk by chunk."""
        for chunk in chunks:
            replay(page, chunk, again[chunk.tokens], scale, scoring)

    def pack_survivors(
        self, pages: Sequence[Page], chunks: Sequence[PromptChunk], scoring: Scoring
    ) -> None:
        """Layer by layer."""
        for page in pages:
            for chunk in chunks:
                pack_survivors(page, chunk, scoring)
