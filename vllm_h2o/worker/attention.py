"""One layer's attention: write, attend, score, choose victims."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from vllm_h2o.errors import IntegrityError, UnsupportedError
from vllm_h2o.kernels.batch import PromptChunk, ScoringPass, StepTensors
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.float8 import DTYPES
from vllm_h2o.kernels.sinks import SinkLogits
from vllm_h2o.kernels.strip import Rotation
from vllm_h2o.kernels.torch.lifetime import keep_scores
from vllm_h2o.kernels.torch.prefill import add_to_scores, column_scores
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.refusals import ANOTHER_MODEL, IN_LAYERS, WHY_IN_LAYERS
from vllm_h2o.worker.metadata import HeavyHitterMetadata
from vllm_h2o.worker.peak import Peak, tiles_of
from vllm_h2o.worker.random import RandomScores
from vllm_h2o.worker.reconstruction import Reconstruction

Watch = Callable[[str, LayerCache, Sequence[PromptChunk], ScoringPass | None], None]
"""(layer, cache, chunks, which): told when a scoring pass, or attention (None), has scored."""


class HeavyHitterImpl(AttentionImpl[HeavyHitterMetadata]):
    """Attention over the resident slots of each KV head.

    ``victims`` ([num_blocks, num_kv_heads], int32) keeps, under a full request's first block, the
    slot that its next token takes in each KV head. It is written before it is read: a request
    becomes full in a step that selects, and a block's next owner is not full. Likewise the cache's
    ``first_rows``, where KV heads share slots.
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
        self.random_scores = RandomScores.of(vllm_config, self.num_kv_heads)
        config = KVPolicyConfig.required(vllm_config)
        if sinks is not None and config.ranking.reads_again:
            raise UnsupportedError(
                "score=reconstruction",
                "a layer has attention sinks",
                "the second reading does not compute them",
                "use --kv-policy-config.score combined",
            )
        self.peak = Peak.of(vllm_config, config)
        self.kinds = (config.splits, config.merges, config.keeps_scores)
        self.splits_layers = config.splits_layers
        self.float8, self.scales = DTYPES.get(kv_cache_dtype), (1.0, 1.0)
        self.victims: torch.Tensor | None = None
        self.rotate: Callable[[torch.Tensor, int, int], torch.Tensor] | None = None
        self.rotate_back: Rotation | None = None
        self.watch: Watch | None = None
        self._cache: tuple[weakref.ref[torch.Tensor], LayerCache] | None = None

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: HeavyHitterMetadata | Reconstruction | None,
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
            attn_metadata: of the step, or of what it reads again; None while profiling.
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
        if isinstance(attn_metadata, Reconstruction):
            attn_metadata.attend(cache, query, key, value, self.scale, output)
            return self._score_read(cache, attn_metadata, name, query, output)
        if attn_metadata.zero_output:
            output.zero_()
        kernels, scoring = attn_metadata.kernels, attn_metadata.scoring
        chunks, initial_score = attn_metadata.prompts, None
        if self.random_scores is not None:
            initial_score = self.random_scores.of_step(
                name, attn_metadata.decodes, chunks, query.shape[0], query.device
            )
        self._score_accepted(cache, attn_metadata, name)
        for tokens, queries in attn_metadata.drafted:
            queries[name] = query[tokens].clone()
        own = (self.scale, self.sink_logits, attn_metadata.layer_index[name])
        tensors = StepTensors(query, key, value, output, initial_score, *own)
        if chunks:
            kernels.prefill(cache, chunks, tensors, scoring)
            self._score_again(cache, attn_metadata, name, query)
        for batch in attn_metadata.decodes:
            kernels.decode(cache, batch, self._victims(cache), tensors, scoring)
        return output

    @property
    def sink_logits(self) -> SinkLogits:
        """[Hq], float32: as they are now, for weights are loaded, and may be again, after this."""
        return None if self.sinks is None else self.sinks.detach().to(torch.float32)

    def cache_of(self, kv_cache: torch.Tensor) -> LayerCache:
        """Its views, made again when vLLM binds another cache, and dropped with this one.

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
        """Of keys and values: the layer's own, which come with the weights."""
        scales = (layer._k_scale_float, layer._v_scale_float)
        if scales != self.scales:
            self.scales, self._cache = scales, None

    def _forget(self, dead: weakref.ref[torch.Tensor]) -> None:
        if self._cache is not None and self._cache[0] is dead:
            self._cache = None

    def _score_read(
        self,
        cache: LayerCache,
        read: Reconstruction,
        name: str,
        query: torch.Tensor,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """What queries of a second reading give; ``output``."""
        read.score(cache, query, self.scale)
        if self.watch is not None:
            self.watch(name, cache, read.prompts, read.which)
        return output

    def _score_again(
        self, cache: LayerCache, metadata: HeavyHitterMetadata, name: str, query: torch.Tensor
    ) -> None:
        """The scoring passes, one after the other."""
        chunks = metadata.prompts
        if self.watch is not None:
            self.watch(name, cache, chunks, None)
        for which, asked in zip(metadata.scoring.passes, metadata.asked, strict=True):
            if not asked:
                continue
            if cache.score_without_window is not None and not which.rotated:
                for chunk in asked:
                    keep_scores(cache, chunk)
            asking = self._rotated(chunks, query, which) if which.rotated else query
            own = (asking, self.scale, which, self.sink_logits)
            metadata.kernels.score_pass(cache, asked, *own)
            if self.watch is not None:
                self.watch(name, cache, chunks, which)

    def _rotated(
        self, chunks: Sequence[PromptChunk], query: torch.Tensor, which: ScoringPass
    ) -> torch.Tensor:
        """[T, Hq, D]: of chunks that it asks, the queries, at positions past the end."""
        if self.rotate is None:
            raise IntegrityError("a second pass scores, and nothing rotates its queries")
        rotated = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for chunk in chunks:
            if chunk.first_query(which) >= chunk.num_tokens:
                continue
            own, found = query[chunk.tokens], rotated[chunk.tokens]
            for tile in tiles_of(len(own), own[0].numel()):
                found[tile] = self.rotate(own[tile], chunk.num_tokens, chunk.logical_end)
        return rotated

    def _score_accepted(self, cache: LayerCache, metadata: HeavyHitterMetadata, name: str) -> None:
        """Add what queries of earlier steps give, of the tokens that were accepted."""
        scoring = replace(metadata.scoring, by_maximum=False)
        for chunk, queries in metadata.accepted:
            own = queries[name][: chunk.num_tokens]
            given = (own, self.scale, scoring, 0, False, self.sink_logits)
            columns = column_scores(cache, chunk, *given)
            add_to_scores(cache, chunk, columns, scoring)

    def _victims(self, cache: LayerCache) -> torch.Tensor:
        """Made in a warm-up where there are graphs: before the first of them is captured."""
        if self.victims is None or self.victims.shape[0] != cache.num_blocks:
            shape = (cache.num_blocks, cache.num_kv_heads)
            self.victims = torch.zeros(shape, dtype=torch.int32, device=cache.key.device)
        return self.victims
