# SPDX-License-Identifier: Apache-2.0
"""The page that vLLM accounts for: K, V, score and position of each slot, perhaps more."""

from __future__ import annotations

from dataclasses import dataclass, fields

from vllm.config import VllmConfig
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from vllm_h2o.errors import UnsupportedError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.remedies import ANOTHER_MODEL
from vllm_h2o.pages import num_pages
from vllm_h2o.scheduler.footprint import slot_extra_bytes


@dataclass(frozen=True, kw_only=True)
class HeavyHitterSpec(FullAttentionSpec):
    """A full-attention page with the score and the position of each slot next to K and V.

    A prompt is kept whole until its end, so one longest request needs the memory of full attention,
    unless survivors are packed after each chunk.
    """

    def __post_init__(self) -> None:
        """Refuse padding, which vLLM adds if other layers have larger pages."""
        super().__post_init__()
        if self.page_size_padded is not None:
            raise UnsupportedError(
                "a kv-policy for this model",
                f"layers with full attention have pages of {self.unpadded_page_size_bytes} bytes, "
                f"others of {self.page_size_padded}",
                "the kernels read pages without padding between them",
                ANOTHER_MODEL,
            )

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of one longest request, which vLLM asks for at the start."""
        max_len = vllm_config.model_config.max_model_len
        config = KVPolicyConfig.of(vllm_config)
        if config is not None and config.schedule.at == "chunk":
            budget = config.resolve(max_len, self.block_size)
            chunk = vllm_config.scheduler_config.max_num_batched_tokens
            max_len = min(max_len, budget.most_slots(chunk))
        return num_pages(max_len, self.block_size) * self.page_size_bytes

    @property
    def stock_page_size_bytes(self) -> int:
        """Bytes of stock vLLM's page with the same slots: K and V alone."""
        slots = self.unpadded_page_size_bytes // self.state_content_size_bytes
        return slots * _kv_bytes(self)

    @classmethod
    def of(cls, spec: AttentionSpec, extra_words: int = 0) -> HeavyHitterSpec:
        """``spec`` with room for scores and positions.

        Args:
            spec: the full-attention spec of vLLM's layer.
            extra_words: of each slot, next to score and position.

        """
        own = {f.name for f in fields(cls)}
        values = {f.name: getattr(spec, f.name) for f in fields(spec) if f.name in own}
        content = _kv_bytes(spec) + slot_extra_bytes(extra_words)
        return cls(**{**values, "state_content_bytes": content})


def _kv_bytes(spec: AttentionSpec) -> int:
    """Bytes of K and V of one slot of one KV head."""
    return (spec.head_size + spec.head_size_v) * get_dtype_size(spec.dtype)
