# SPDX-License-Identifier: Apache-2.0
"""What a layer keeps from step to step."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from vllm.config import set_current_vllm_config

from tests.kernels.harness import Shape, empty_cache, vllm_config
from vllm_h2o.errors import IntegrityError, UnsupportedError
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


def test_sinks_are_as_they_were_loaded() -> None:
    """vLLM fills its parameter after the layer is made, in the model's own dtype."""
    sinks = torch.nn.Parameter(torch.full((6,), torch.nan, dtype=torch.bfloat16))
    with set_current_vllm_config(vllm_config("h2o")):
        sizes = (6, SHAPE.head_size, SHAPE.scale, SHAPE.num_kv_heads)
        layer, bare = HeavyHitterImpl(*sizes, sinks=sinks), HeavyHitterImpl(*sizes)
    sinks.data.copy_(torch.arange(6))
    assert layer.sink_logits is not None and layer.sink_logits.dtype == torch.float32
    assert layer.sink_logits.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert not layer.sink_logits.requires_grad
    assert bare.sink_logits is None


def test_other_rows_in_a_block() -> None:
    """Of other layers, where none are said to share; and sinks, where prompts are read again."""
    sizes = (6, SHAPE.head_size, SHAPE.scale, SHAPE.num_kv_heads)
    two_layers = empty_cache(replace(SHAPE, num_kv_heads=4), 4)
    for options, shares in ((), False), ((("score", "reconstruction"),), True):
        with set_current_vllm_config(vllm_config("h2o2", options)):
            layer = HeavyHitterImpl(*sizes)
            layer.kinds = (True, False, False)
            if shares:
                assert layer.cache_of(two_layers[:, 2:]).first_head == 2
                with pytest.raises(UnsupportedError, match="a layer has attention sinks"):
                    HeavyHitterImpl(*sizes, sinks=torch.nn.Parameter(torch.zeros(6)))
            else:
                with pytest.raises(IntegrityError, match="blocks have 4 rows for 2 KV heads"):
                    layer.cache_of(two_layers[:, 2:])
