# SPDX-License-Identifier: Apache-2.0
"""One layer's attention: write, attend, score, choose victims."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from vllm_h2o.errors import IntegrityError, UnsupportedError
from vllm_h2o.kernels.batch import PromptChunk, StepTensors
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.float8 import DTYPES
from vllm_h2o.kernels.rope import Rope
from vllm_h2o.kernels.sinks import SinkLogits
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.refusals import IN_LAYERS, WHY_IN_LAYERS
from vllm_h2o.options.remedies import ANOTHER_MODEL
from vllm_h2o.policy import Term
from vllm_h2o.worker.metadata import HeavyHitterMetadata
from vllm_h2o.worker.peak import Peak
from vllm_h2o.worker.reconstruction import Reconstruction

Watch = Callable[[str, LayerCache, Sequence[PromptChunk], Term | None], None]
"""(layer, cache, chunks, term): told when a term, or attention (None), has been added to scores."""


class HeavyHitterImpl(AttentionImpl[HeavyHitterMetadata]):
    """Attention over the resident slots of each KV head."""

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
        sinks: torch.Tensor | None = None,
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
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.sinks = sinks
        self.num_kv_heads = num_kv_heads or num_heads
        vllm_config = get_current_vllm_config()
        config = KVPolicyConfig.required(vllm_config)
        if sinks is not None and config.ranking.term("reread"):
            raise UnsupportedError(
                "score=reconstruction",
                "a layer has attention sinks",
                "the second reading does not compute them",
                "use --kv-policy-config.score combined",
            )
        self._peak = partial(Peak.of, vllm_config, config)
        self.kinds = (config.splits, config.merges, config.keeps_scores)
        self.splits_layers = config.splits_layers
        self.float8, self.scales = DTYPES.get(kv_cache_dtype), (1.0, 1.0)
        self.rope: Callable[[], Rope] | None = None
        self.rope_back: Rope | None = None
        self.watch: Watch | None = None
        self._cache: tuple[weakref.ref[torch.Tensor], LayerCache] | None = None

    @cached_property
    def peak(self) -> Peak:
        """Memory that it takes. Beside states vLLM fixes a page's size after it makes layers."""
        return self._peak()

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
            attn_metadata: of the step, or of the pass that reads prompts again; None while
                profiling.
            output: [num_tokens, num_heads, head_size], written.
            output_scale: of a fused quantisation; refused.
            output_block_scale: of a fused quantisation; refused.

        Returns:
            ``output``.

        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantisation is not supported with a kv-policy")
        if attn_metadata is None:
            self.peak.allocate(str(layer.layer_name), query, self.num_kv_heads)
            return output.zero_()
        if self.float8 is not None:
            self.take_scales(layer)
        cache, name = self.cache_of(kv_cache), str(layer.layer_name)
        rope = None if self.rope is None else self.rope()  # vLLM may have made another table
        own = (self.scale, self.sink_logits, attn_metadata.layer_index[name], rope)
        tensors = StepTensors(query, key, value, output, *own)
        if attn_metadata.reading is not None:
            self._reread(cache, attn_metadata.reading, name, tensors)
            return output
        if attn_metadata.zero_output:
            output.zero_()
        kernels, scoring = attn_metadata.kernels, attn_metadata.scoring
        self._score_drafts(cache, attn_metadata, name, tensors)
        if attn_metadata.prompts:
            lse = kernels.prefill(cache, attn_metadata.prompts, tensors, scoring)
            self._score_terms(cache, attn_metadata, name, replace(tensors, lse=lse))
        for batch in attn_metadata.decodes:
            assert cache.victims is not None
            kernels.decode(cache, batch, cache.victims, tensors, scoring)
        return output

    @property
    def sink_logits(self) -> SinkLogits:
        """[Hq], float32, read anew: weights are loaded after the layer is made."""
        return None if self.sinks is None else self.sinks.detach().to(torch.float32)

    def cache_of(self, kv_cache: torch.Tensor) -> LayerCache:
        """Views of a cache, made again when vLLM binds another one, and dropped with it.

        vLLM profiles with a small cache of its own, whose memory must be free when the real one is
        allocated: neither the tensor nor, by views of it, its storage may be held here.
        """
        if self._cache is None or self._cache[0]() is not kv_cache:
            own = (self.float8, self.scales)
            views = LayerCache.of(kv_cache.detach(), self.head_size, *self.kinds, *own)
            if views.num_heads_of_all and not self.splits_layers:
                raise IntegrityError(
                    f"blocks have {views.rows_per_block} rows for {views.num_kv_heads} KV heads, "
                    "and layers are not said to share slots"
                )
            self._cache = (weakref.ref(kv_cache, self._forget), views)
        return self._cache[1]

    def take_scales(self, layer: Any) -> None:
        """Take the scales of keys and values, which come with the layer's weights."""
        scales = (layer._k_scale_float, layer._v_scale_float)
        if scales == self.scales:
            return
        self.scales = scales
        if self._cache is not None:  # running requests keep what it has under their first blocks
            self._cache = (self._cache[0], replace(self._cache[1], scales=scales))

    def _forget(self, dead: weakref.ref[torch.Tensor]) -> None:
        if self._cache is not None and self._cache[0] is dead:
            self._cache = None

    def _reread(
        self, cache: LayerCache, reading: Reconstruction, name: str, tensors: StepTensors
    ) -> None:
        """Attend and score in the pass that reads prompts again."""
        asked = (tensors.query, tensors.key, tensors.value, self.scale, tensors.out)
        others = reading.attend(cache, *asked)
        reading.score(cache, replace(tensors, sink_logits=others))
        if self.watch is not None:
            self.watch(name, cache, reading.prompts, reading.term)

    def _score_terms(
        self, cache: LayerCache, metadata: HeavyHitterMetadata, name: str, tensors: StepTensors
    ) -> None:
        """Add the terms of the ranking that prompts have, one after the other."""
        kernels, chunks = metadata.kernels, metadata.prompts
        if self.watch is not None:
            self.watch(name, cache, chunks, None)
        for term, asked in zip(metadata.terms, metadata.asked, strict=True):
            if not asked:
                continue
            kernels.score_term(cache, asked, tensors, term, metadata.scoring.by_age)
            if self.watch is not None:
                self.watch(name, cache, chunks, term)

    def _score_drafts(
        self, cache: LayerCache, metadata: HeavyHitterMetadata, name: str, tensors: StepTensors
    ) -> None:
        """Add what accepted drafts of earlier steps pay; keep the queries of this step's."""
        for chunk, queries in metadata.drafts.accepted:
            own = replace(tensors, query=queries[name][: chunk.num_tokens])
            paid = Term("window", "sum", metadata.scoring.power)
            metadata.kernels.score_term(cache, [chunk], own, paid, by_age=False)
        for tokens, queries in metadata.drafts.drafted:
            queries[name] = tensors.query[tokens].clone()
