"""The page that vLLM accounts for: K, V, and eight bytes a slot for score and position."""

from __future__ import annotations

from dataclasses import dataclass, fields

from vllm.config import VllmConfig
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.pages import num_pages
from vllm_h2o.scheduler.footprint import SCORE_AND_POSITION_BYTES


@dataclass(frozen=True, kw_only=True)
class HeavyHitterSpec(FullAttentionSpec):
    """A full-attention page with the score and the position of each slot next to K and V.

    A prompt is kept whole until its end, so the memory of one longest request is that of full
    attention, unless survivors are packed after each chunk.
    """

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of one longest request, which vLLM asks for at the start."""
        max_len = vllm_config.model_config.max_model_len
        config = KVPolicyConfig.of(vllm_config)
        if config is not None and config.prefill == "chunked":
            budget = config.resolve(max_len, self.block_size)
            chunk = vllm_config.scheduler_config.max_num_batched_tokens
            max_len = min(max_len, budget.most_slots(chunk))
        return num_pages(max_len, self.block_size) * self.page_size_bytes

    @property
    def stock_page_size_bytes(self) -> int:
        """Bytes of stock vLLM's page of as many slots: K and V alone."""
        slots = self.unpadded_page_size_bytes // self.state_content_size_bytes
        return slots * (self.state_content_size_bytes - SCORE_AND_POSITION_BYTES)

    @classmethod
    def of(cls, spec: AttentionSpec) -> HeavyHitterSpec:
        """``spec`` with the eight bytes added to each slot.

        Args:
            spec: the full-attention spec that vLLM's layer made.

        """
        own = {f.name for f in fields(cls)}
        values = {f.name: getattr(spec, f.name) for f in fields(spec) if f.name in own}
        kv_bytes = (spec.head_size + spec.head_size_v) * get_dtype_size(spec.dtype)
        return cls(**{**values, "state_content_bytes": kv_bytes + SCORE_AND_POSITION_BYTES})
