# SPDX-License-Identifier: Apache-2.0
"""Layers that the policy's page does not fit stop the engine."""

from __future__ import annotations

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, SlidingWindowSpec

from tests.kernels.harness import vllm_config
from vllm_h2o.errors import UnsupportedError
from vllm_h2o.scheduler.spec import HeavyHitterSpec
from vllm_h2o.worker.backend import HeavyHitterBackend

COMMON = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


@pytest.mark.parametrize(("merge", "extra"), [(0.0, 8), (0.9, 12)])
def test_a_full_attention_layer_gets_more_bytes_a_slot(merge: float, extra: int) -> None:
    """Score and position, next to K and V; masses where tokens are merged."""
    with set_current_vllm_config(vllm_config("h2o", (("merge", merge),))):
        spec = HeavyHitterBackend.customize_spec(FullAttentionSpec(**COMMON))
    assert isinstance(spec, HeavyHitterSpec)
    assert spec.page_size_bytes == 2 * 16 * (2 * 64 * 2 + extra)
    assert spec.stock_page_size_bytes == 2 * 16 * 2 * 64 * 2


@pytest.mark.parametrize(
    "spec",
    [FullAttentionSpec(**COMMON, head_size_v=128), SlidingWindowSpec(**COMMON, sliding_window=64)],
    ids=["K and V of two sizes", "a sliding window"],
)
def test_another_layer_is_refused(spec: AttentionSpec) -> None:
    """Rewriting it into full attention would be wrong, and wrong without a word."""
    with pytest.raises(
        UnsupportedError, match="K and V of one size, of a layer with full attention"
    ):
        HeavyHitterBackend.customize_spec(spec)
