"""One layer's attention: write, attend, score, choose victims or pack."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.errors import IntegrityError, UnsupportedError
from vllm_h2o.kernels.batch import DecodeBatch, PromptChunk
from vllm_h2o.kernels.cpu import decode, prompt
from vllm_h2o.kernels.cpu.scoring import random_scores
from vllm_h2o.kernels.page import Page
from vllm_h2o.policy import ScoreKind
from vllm_h2o.worker.metadata import HeavyHitterMetadata


class HeavyHitterImpl(AttentionImpl[HeavyHitterMetadata]):
    """Attention over the resident slots of each KV head.

    ``victims`` ([num_blocks, num_kv_heads], int32) keeps, under a full request's first block, the
    slot that its next token takes in each KV head. It is written before it is read: a request
    becomes full in a step that selects, and a block's next owner is not full.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        unsupported = {
            "ALiBi": alibi_slopes,
            "a sliding window": sliding_window,
            "a soft cap of the logits": logits_soft_cap,
            "cross-layer KV sharing": kv_sharing_target_layer_name,
            f"{attn_type} attention": None if attn_type == AttentionType.DECODER else attn_type,
            **{f"the attention argument {name!r}": value for name, value in extra.items()},
        }
        for what, value in unsupported.items():
            if value is not None:
                raise UnsupportedError(
                    "a kv-policy for this model",
                    f"a layer uses {what}",
                    "the policy's attention does not compute it",
                    "run this model without --kv-policy",
                )
        config = KVPolicyConfig.from_additional_config(get_current_vllm_config().additional_config)
        if config is None:
            raise IntegrityError("the policy's attention backend runs without a kv_policy")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.score_kind = config.policy.score
        self.victims: torch.Tensor | None = None

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: HeavyHitterMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            layer: vLLM's attention layer.
            query: [num_tokens, num_heads, head_size].
            key: [num_tokens, num_kv_heads, head_size].
            value: [num_tokens, num_kv_heads, head_size].
            kv_cache: [num_blocks, num_kv_heads, block_size, content].
            attn_metadata: of the step; None while profiling.
            output: [num_tokens, num_heads, head_size], written.
            output_scale: of a fused quantisation; refused.
            output_block_scale: of a fused quantisation; refused.

        Returns:
            ``output``.

        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantisation is not supported with a kv-policy")
        if attn_metadata is None:
            return output
        page = Page.of(kv_cache, self.head_size)
        for batch in attn_metadata.decodes:
            self._decode(layer, page, batch, query, key, value, output)
        for chunk in attn_metadata.prompts:
            self._prompt(layer, page, chunk, query, key, value, output)
        return output

    def _decode(
        self,
        layer: torch.nn.Module,
        page: Page,
        batch: DecodeBatch,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        if self.victims is None or self.victims.shape[0] != page.num_blocks:
            shape = (page.num_blocks, page.num_kv_heads)
            self.victims = torch.zeros(shape, dtype=torch.int32, device=query.device)
        token = batch.token
        first = self._drawn(layer, batch.seed, batch.position) if self._draws else None
        decode.store(page, batch, self.victims, key[token], value[token], first)
        out = decode.attend_and_score(page, batch, query[token], self.scale, self._accumulates)
        output[token] = out.to(output.dtype)
        decode.select_victims(page, batch, self.victims)

    def _prompt(
        self,
        layer: torch.nn.Module,
        page: Page,
        chunk: PromptChunk,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        tokens = chunk.tokens
        first = None
        if self._draws:
            end = chunk.position + tokens.stop - tokens.start
            position = torch.arange(chunk.position, end, device=query.device)
            first = self._drawn(layer, torch.full_like(position, chunk.seed), position)
        prompt.store(page, chunk, key[tokens], value[tokens], first)
        out = prompt.attend_and_score(page, chunk, query[tokens], self.scale, self._accumulates)
        output[tokens] = out.to(output.dtype)
        if chunk.keep:
            prompt.pack_survivors(page, chunk)

    @property
    def _accumulates(self) -> bool:
        return self.score_kind is ScoreKind.SUM

    @property
    def _draws(self) -> bool:
        return self.score_kind is ScoreKind.RANDOM

    def _drawn(
        self, layer: torch.nn.Module, seed: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] scores that tokens of the ``random`` policy are stored with."""
        index = extract_layer_index(layer.layer_name)
        return random_scores(seed, index, self.num_kv_heads, position)
