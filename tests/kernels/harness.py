# SPDX-License-Identifier: Apache-2.0
"""One attention layer with the real builder and the real ledger, over one small pool of pages.

Pages start as poison (NaN keys, values and scores, the lowest score, position 0) and are poisoned
again when they are freed; after a request's own pages its row of the block table has other pages.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CacheConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.kernels.life import Life, Shape
from tests.kernels.metadata import common_metadata
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.float8 import DTYPES
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.kernels.rope import Rope
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.paths import WORKER
from vllm_h2o.scheduler.spec import HeavyHitterSpec
from vllm_h2o.wire import RequestPlan, ResidencyPlan
from vllm_h2o.worker.attention import HeavyHitterImpl
from vllm_h2o.worker.metadata import HeavyHitterMetadata, HeavyHitterMetadataBuilder
from vllm_h2o.worker.step import Step, publish

LAYER_INDEX = 3
LAYER_NAMES = [f"model.layers.{LAYER_INDEX + i}.self_attn.attn" for i in range(9)]
LAYER_NAME = LAYER_NAMES[0]
NUM_PADDING = 3
"""Rows of tokens after those of the batch, as a captured graph has them."""


def rope_of(head_size: int, num_positions: int = 1000, size: int | None = None) -> Rope:
    """Stand in for a layer's rotary embedding: quarter turns, exact in any dtype.

    Args:
        head_size: D.
        num_positions: rows of its table.
        size: elements that are rotated; None: half of a head.

    """
    pairs = torch.arange(1, (size or head_size // 2) // 2 + 1)
    quarters = torch.arange(1, num_positions + 1)[:, None] * pairs % 4
    cos, sin = torch.tensor([1.0, 0.0, -1.0, 0.0]), torch.tensor([0.0, 1.0, 0.0, -1.0])
    return Rope(torch.cat([cos[quarters], sin[quarters]], dim=1), is_neox=head_size % 32 == 0)


def named(float8: torch.dtype | None) -> Any:
    """The type of a cache, by vLLM's name."""
    return next((name for name, dtype in DTYPES.items() if dtype == float8), "auto")


@lru_cache
def vllm_config(
    policy: str,
    options: tuple[tuple[str, object], ...] = (),
    float8: torch.dtype | None = None,
) -> VllmConfig:
    """A config without a model, with the policy and the policy's worker."""
    return VllmConfig(
        additional_config={"kv_policy": {"name": policy, **dict(options)}},
        cache_config=CacheConfig(enable_prefix_caching=False, cache_dtype=named(float8)),
        parallel_config=ParallelConfig(worker_cls=WORKER),
    )


def builder(
    shape: Shape, policy: str, options: tuple[tuple[str, object], ...] = ()
) -> HeavyHitterMetadataBuilder:
    """The real one."""
    stock = FullAttentionSpec(
        block_size=shape.block_size,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        dtype=torch.uint8 if shape.float8 else shape.dtype,
    )
    config = vllm_config(policy, options, shape.float8)
    spec = HeavyHitterSpec.of(stock, KVPolicyConfig.required(config).extra_words)
    names = LAYER_NAMES[: shape.num_layers]
    context = config.compilation_config.static_forward_context
    for name in names:
        context.setdefault(name, SimpleNamespace(impl=SimpleNamespace(rope=rope_of(64))))
    return HeavyHitterMetadataBuilder(spec, names, config, torch.device("cpu"))


def empty_cache(shape: Shape, num_blocks: int, extra_words: int = 0) -> torch.Tensor:
    """A layer's cache as vLLM binds it, or that of all that share slots; every byte 0xFF."""
    size = shape.stored.itemsize
    content = 2 * shape.head_size + (8 + 4 * extra_words) // size
    layout = (num_blocks, shape.num_heads_of_all, shape.block_size, content)
    raw = torch.full((math.prod(layout) * size,), 0xFF, dtype=torch.uint8)
    return (raw if shape.float8 else raw.view(shape.dtype)).view(layout)


def views(kv_cache: torch.Tensor, shape: Shape, *kinds: bool) -> LayerCache:
    """A layer's cache as pages; ``kinds`` are whether heads split, tokens merge, scores last.

    Where layers share slots, it is that of the one in the middle.
    """
    kinds = (*kinds, False, False, False)[:3]
    kv_cache = kv_cache[:, shape.heads(shape.num_layers // 2)]
    return LayerCache.of(kv_cache, shape.head_size, *kinds, shape.float8, shape.scales)


class Layer:
    """The layer, its pool of pages and its requests' block tables.

    Args:
        shape: sizes; layers that share slots look like one that has all their heads.
        policy: name of the policy.
        num_blocks: pages of the pool, the null page included.
        seed: of page order, row order and poison.
        extra_pages: width by which block tables of decoding requests are widened.
        kernels: what computes; the builder's own choice when None.
        options: of the policy.

    """

    def __init__(
        self,
        shape: Shape,
        policy: str,
        num_blocks: int,
        seed: int = 0,
        extra_pages: int = 0,
        kernels: Kernels | None = None,
        options: tuple[tuple[str, object], ...] = (),
    ) -> None:
        self.shape, self.extra_pages = shape, extra_pages
        self.layer_name = LAYER_NAME
        self.random = random.Random(seed)
        self.builder = builder(shape, policy, options)
        if kernels is not None:
            self.builder.use(kernels)
        self.config = vllm_config(policy, options, shape.float8)
        self._k_scale_float, self._v_scale_float = shape.scales
        extra_words = KVPolicyConfig.required(self.config).extra_words
        self.kv_cache = empty_cache(shape, num_blocks, extra_words)
        self.parts = [self._part(layer) for layer in range(shape.num_layers)]
        self.impl: HeavyHitterImpl = self.parts[0].impl
        self.free = list(range(1, num_blocks))
        self.random.shuffle(self.free)
        self.tables: dict[str, list[int]] = {}
        self._poison(range(num_blocks))

    def step(
        self, plans: Mapping[str, RequestPlan], lives: Mapping[str, Life]
    ) -> dict[str, torch.Tensor]:
        """Run the plans in any order of rows; outputs [T, Hq, D], float32, by request."""
        order = list(plans)
        self.random.shuffle(order)
        for request_id in order:
            plan = plans[request_id]
            self._hold(request_id, max(plan.attended_len, plan.held_end))
        step = Step(ResidencyPlan(plans), lambda _: order)
        lengths = [plans[request_id].num_new for request_id in order]
        common = common_metadata([*lengths, 0], self._block_tables(order))
        for part in self.parts:
            self.config.compilation_config.static_forward_context[part.layer_name] = part
        with publish(step):
            metadata = self.builder.build(0, common)
        parts = zip(*(lives[name].tokens(plans[name]) for name in order), strict=True)
        query, key, value = (self._padded(torch.cat(part)) for part in parts)
        outputs = []
        given = (tokens.chunk(len(self.parts), dim=1) for tokens in (query, key, value))
        for part, *own in zip(self.parts, *given, strict=True):
            outputs.append(torch.full(own[0].shape, torch.nan))
            part.impl.forward(part, *own, part.kv_cache, self._widened(metadata), outputs[-1])
        output = torch.cat(outputs, dim=1)
        step.after.run()
        padding = output[sum(lengths) :]
        assert (padding.isnan() | (padding == 0)).all(), "a row of padding was written"
        return dict(zip(order, output[: sum(lengths)].split(lengths), strict=True))

    def release(self, request_id: str, num_slots: int = 0) -> None:
        """Free the pages after the first ``num_slots`` slots."""
        keep = -(-num_slots // self.shape.block_size)
        freed = self.tables[request_id][keep:]
        del self.tables[request_id][keep:]
        self._poison(freed)
        self.free += freed
        self.random.shuffle(self.free)

    def rows(self, request_id: str, num_slots: int) -> torch.Tensor:
        """[H, P] rows of the page views that hold the first slots of a request."""
        num_pages = -(-num_slots // self.shape.block_size)
        return self.cache.rows(torch.tensor(self.tables[request_id][:num_pages]))

    def slots(self, view: torch.Tensor, request_id: str, num_slots: int) -> torch.Tensor:
        """[H, num_slots, ...]: the first slots of a request in one of the page's views."""
        return view[self.rows(request_id, num_slots)].flatten(1, 2)[:, :num_slots]

    def strips(self, request_id: str, num_slots: int, is_split: bool) -> list[torch.Tensor]:
        """[P_h] rows of the page views that each KV head's slots lie in."""
        rows = self.rows(request_id, num_slots)
        if not is_split:
            return list(rows)
        return self.cache.rows_of_split(torch.tensor(self.tables[request_id])[: rows.shape[1]])

    def held(self, request_id: str, plan: RequestPlan) -> list[Strip]:
        """The strip of each KV head after a step, in float64."""
        strips = []
        for rows in self.strips(request_id, plan.held_end, plan.is_split):
            num_slots = plan.resident_end
            if plan.is_split:
                num_slots = len(rows) * self.shape.block_size - (plan.splits > 0)
            cache = self.cache
            views = [cache.key, cache.value, cache.score, cache.position]
            views += [] if cache.mass is None else [cache.mass]
            key, value, score, position, *mass = (
                view[rows].flatten(0, 1)[:num_slots] for view in views
            )
            key_scale, value_scale = cache.scales
            read = (key.double() * key_scale, value.double() * value_scale)
            tokens = (*read, score.double(), position.long())
            strips.append(Strip(*tokens, *mass))
        return strips

    def victims(self, request_id: str) -> torch.Tensor | None:
        """[H] slots of the victims of a full request."""
        each = [part.impl.cache_of(part.kv_cache).victims for part in self.parts]
        return torch.cat([victims[self.tables[request_id][0]] for victims in each])

    @property
    def cache(self) -> LayerCache:
        """Its pages; those of layers that share slots as if they were of one."""
        caches: list[LayerCache] = [part.impl.cache_of(part.kv_cache) for part in self.parts]
        if len(caches) == 1:
            return caches[0]
        joined = caches[0].joined()
        for cache in caches:
            assert joined.first_rows is not None and cache.first_rows is not None
            own = slice(cache.first_head, cache.first_head + cache.num_kv_heads + 1)
            joined.first_rows[:, own] = cache.first_rows
        return joined

    def _part(self, layer: int) -> Any:
        """Stand in for vLLM's attention layer, one of those that share slots."""
        shape = self.shape
        sizes = (shape.num_kv_heads * shape.group, shape.head_size, shape.scale, shape.num_kv_heads)
        sinks = torch.linspace(-1.0, 4.0, sizes[0]) if shape.has_sinks else None
        with set_current_vllm_config(self.config):
            impl = HeavyHitterImpl(*sizes, kv_cache_dtype=named(shape.float8), sinks=sinks)
        rope = rope_of(shape.head_size)
        impl.splits_layers, impl.rope = shape.num_layers > 1, lambda: rope
        impl.take_scales(self)
        scales = dict(zip(("_k_scale_float", "_v_scale_float"), shape.scales, strict=True))
        own = self.kv_cache[:, shape.heads(layer)]
        return SimpleNamespace(impl=impl, layer_name=LAYER_NAMES[layer], kv_cache=own, **scales)

    def _hold(self, request_id: str, num_slots: int) -> None:
        table = self.tables.setdefault(request_id, [])
        while len(table) * self.shape.block_size < num_slots:
            table.append(self.free.pop())

    def _block_tables(self, order: Sequence[str]) -> torch.Tensor:
        """[rows, width]; others' pages after a row's own, and a row of padding at the end."""
        width = max(len(self.tables[name]) for name in order) + 1
        stale = [block for block in range(self.cache.num_blocks) if block not in self.free]
        rows = []
        for request_id in (*order, None):
            own = self.tables[request_id] if request_id else []
            others = [block for block in stale if block not in own] or [0]
            rows.append(own + self.random.choices(others, k=width - len(own)))
        return torch.tensor(rows, dtype=torch.int32)

    def _widened(self, metadata: HeavyHitterMetadata) -> HeavyHitterMetadata:
        def wide(table: torch.Tensor) -> torch.Tensor:
            return torch.cat([table, table.new_zeros(table.shape[0], self.extra_pages)], 1)

        decodes = [
            replace(batch, block_table=wide(batch.block_table)) for batch in metadata.decodes
        ]
        return replace(metadata, decodes=decodes)

    def _padded(self, tokens: torch.Tensor) -> torch.Tensor:
        padding = torch.full((NUM_PADDING, *tokens.shape[1:]), torch.nan, dtype=tokens.dtype)
        return torch.cat([tokens, padding])

    def _poison(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            rows, cache = self.cache.rows(torch.tensor([block])), self.cache
            cache.key[rows] = torch.nan
            cache.value[rows] = torch.nan
            cache.score[rows] = self.random.choice([torch.nan, -torch.inf])
            cache.position[rows] = self.random.choice([0, 5, 1 << 30])
            if cache.mass is not None:
                cache.mass[rows] = torch.nan
