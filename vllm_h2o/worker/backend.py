"""The attention backend that vLLM selects when a policy is on."""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_h2o.scheduler.spec import HeavyHitterSpec
from vllm_h2o.worker.attention import HeavyHitterImpl
from vllm_h2o.worker.metadata import HeavyHitterMetadataBuilder


class HeavyHitterBackend(AttentionBackend):
    """Attention over resident slots, with scores and eviction."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float32", "bfloat16", "float16"]
    # Slots follow from residency, not from positions: vLLM's slot mapping is not used.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """The registry's name: the slot that vLLM keeps for out-of-tree backends."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[HeavyHitterImpl]:
        """What computes attention."""
        return HeavyHitterImpl

    @staticmethod
    def get_builder_cls() -> type[HeavyHitterMetadataBuilder]:
        """What turns a plan into tensors."""
        return HeavyHitterMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The layer's page, with score and position."""
        return HeavyHitterSpec.of(spec)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Head-major: each KV head's part of a page is contiguous."""
        return (KVCacheLayout.LBHNC,)
