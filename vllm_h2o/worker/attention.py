"""One layer's attention: write, attend, score, choose victims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from vllm_h2o.errors import IntegrityError, UnsupportedError
from vllm_h2o.kernels.cache import Page
from vllm_h2o.kernels.torch.pack import window_scores
from vllm_h2o.kernels.torch.random import random_scores
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.refusals import ANOTHER_MODEL, IN_LAYERS, WHY_IN_LAYERS
from vllm_h2o.policy import ScoreKind
from vllm_h2o.worker.metadata import HeavyHitterMetadata, drawn_by_position, heads_of_rank


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
        asked = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "attn_type": None if attn_type == AttentionType.DECODER else attn_type,
            **extra,
        }
        for name, value in asked.items():
            if value is not None:
                raise UnsupportedError(
                    "a kv-policy for this model",
                    f"a layer uses {IN_LAYERS.get(name, f'the argument {name!r}')}",
                    WHY_IN_LAYERS,
                    ANOTHER_MODEL,
                )
        config = KVPolicyConfig.from_additional_config(get_current_vllm_config().additional_config)
        if config is None:
            raise IntegrityError("the policy's attention backend runs without a kv_policy")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.draws = config.policy.score is ScoreKind.RANDOM
        self.heads = heads_of_rank(get_current_vllm_config(), self.num_kv_heads)
        self.page: tuple[torch.Tensor, Page] | None = None
        self.victims: torch.Tensor | None = None
        self.turn: Callable[[torch.Tensor, int], torch.Tensor] | None = None

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
            return output.zero_()
        if attn_metadata.blank:
            output.zero_()
        page = self._page_of(kv_cache)
        kernels, scoring = attn_metadata.kernels, attn_metadata.scoring
        step = (query, key, value)
        first = self._drawn(layer, attn_metadata, query) if self.draws else None
        if attn_metadata.prompts:
            chunks = attn_metadata.prompts
            kernels.prefill(page, chunks, *step, first, self.scale, scoring, output)
            if scoring.replays:
                self._replay(page, attn_metadata, query)
            elif scoring.power:
                self._watch(layer, page, attn_metadata, query)
        for batch in attn_metadata.decodes:
            victims = self._victims(page)
            kernels.decode(page, batch, victims, *step, first, self.scale, scoring, output)
        return output

    def _page_of(self, kv_cache: torch.Tensor) -> Page:
        """Its views, made again when vLLM binds another cache."""
        if self.page is None or self.page[0] is not kv_cache:
            self.page = (kv_cache, Page.of(kv_cache, self.head_size))
        return self.page[1]

    def _replay(self, page: Page, metadata: HeavyHitterMetadata, query: torch.Tensor) -> None:
        """Ask the queries of each chunk again, from behind its end."""
        if self.turn is None:
            raise IntegrityError("queries are to be asked again, and nothing turns them")
        again = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for chunk in metadata.prompts:
            again[chunk.tokens] = self.turn(query[chunk.tokens], chunk.position_end)
        metadata.kernels.replay(page, metadata.prompts, again, self.scale, metadata.scoring)

    def _watch(
        self, layer: torch.nn.Module, page: Page, metadata: HeavyHitterMetadata, query: torch.Tensor
    ) -> None:
        """Keep, beside the pages, the scores of prompts whose survivors leave shared ones."""
        metadata.watched[str(layer.layer_name)] = {
            chunk.tokens.start: window_scores(
                page, chunk, query[chunk.tokens], self.scale, metadata.scoring
            )
            for chunk in metadata.prompts
            if chunk.into is not None
        }

    def _victims(self, page: Page) -> torch.Tensor:
        """Made in a warm-up where there are graphs: before the first of them is captured."""
        if self.victims is None or self.victims.shape[0] != page.num_blocks:
            shape = (page.num_blocks, page.num_kv_heads)
            self.victims = torch.zeros(shape, dtype=torch.int32, device=page.key.device)
        return self.victims

    def _drawn(
        self, layer: torch.nn.Module, metadata: HeavyHitterMetadata, query: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] scores that tokens of the ``random`` policy are stored with."""
        name = str(layer.layer_name)
        first = torch.zeros(query.shape[0], self.num_kv_heads, device=query.device)
        for batch in metadata.decodes:
            seed, position = batch.order("seed"), batch.order("position")
            drawn = random_scores(seed, extract_layer_index(name), self.heads, position)
            first.index_copy_(0, batch.order("token"), drawn)
        for chunk in metadata.prompts:
            drawn = drawn_by_position(name, chunk, self.heads, query.device)
            first[chunk.tokens] = drawn[chunk.position :]
        return first
