"""What a layer keeps from step to step."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from vllm.config import set_current_vllm_config

from tests.kernels.harness import Shape, empty_cache, vllm_config
from vllm_h2o.worker.attention import HeavyHitterImpl

SHAPE = Shape(num_kv_heads=2, group=3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_view_outlives_a_cache(mode: Any) -> None:
    """vLLM profiles with a cache of its own: what it gives up is free, whatever was computed."""
    context: AbstractContextManager[Any] = mode()
    with set_current_vllm_config(vllm_config("h2o")), context:
        layer = HeavyHitterImpl(6, SHAPE.head_size, SHAPE.scale, SHAPE.num_kv_heads)
        cache = empty_cache(SHAPE, 4)
        storage, tensor = StorageWeakRef(cache.untyped_storage()), weakref.ref(cache)
        views = layer.cache_of(cache)
        assert layer.cache_of(cache) is views
        del views, cache
        assert tensor() is None and storage.expired()
        other = empty_cache(SHAPE, 5)
        assert layer.cache_of(other).num_blocks == 5
