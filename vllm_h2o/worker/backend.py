# SPDX-License-Identifier: Apache-2.0
"""The attention backend that vLLM selects when a policy is on."""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config, get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_h2o.errors import UnsupportedError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.refusals import CACHE_DTYPES
from vllm_h2o.scheduler.spec import HeavyHitterSpec
from vllm_h2o.worker.attention import HeavyHitterImpl
from vllm_h2o.worker.metadata import HeavyHitterMetadataBuilder


class HeavyHitterBackend(AttentionBackend):
    """Attention over resident slots, with scores and eviction."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)
    # Slots follow from what is resident, not from positions: vLLM's slot mapping is not used.
    forward_includes_kv_cache_update = True
    loaded_for: ClassVar[VllmConfig | None] = None
    """Config of the model that this process loaded last: vLLM 0.32 fits pages to states without a
    current config."""

    @staticmethod
    def get_name() -> str:
        """The registry's name: the slot that vLLM keeps for out-of-tree backends."""
        return "CUSTOM"

    @classmethod
    def supports_sink(cls) -> bool:
        """Logits that heads have learned take part in attention, and in scores."""
        return True

    @staticmethod
    def get_impl_cls() -> type[HeavyHitterImpl]:
        """The class that computes attention."""
        return HeavyHitterImpl

    @staticmethod
    def get_builder_cls() -> type[HeavyHitterMetadataBuilder]:
        """The class that turns a plan into tensors."""
        return HeavyHitterMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The layer's page, with what a slot of the policy holds next to K and V.

        Raises:
            UnsupportedError: for a layer that is not plain full attention.

        """
        if type(spec) is not FullAttentionSpec or spec.head_size_v != spec.head_size:
            raise UnsupportedError(
                "a kv-policy for this model",
                f"a layer keeps {type(spec).__name__} with heads of {spec.head_size} (K) and "
                f"{spec.head_size_v} (V)",
                "the policy's page holds K and V of one size, of a layer with full attention",
                "run this model without --kv-policy",
            )
        config = KVPolicyConfig.required(get_current_vllm_config_or_none() or cls.loaded_for)
        return HeavyHitterSpec.of(spec, config.extra_words)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Head-major: each KV head's part of a page is contiguous.

        Where layers share slots, a block has the pages of all layers next to each other.
        """
        config = KVPolicyConfig.required(get_current_vllm_config())
        return (KVCacheLayout.BLHNC if config.splits_layers else KVCacheLayout.LBHNC,)
