# SPDX-License-Identifier: Apache-2.0
"""Memory that attention takes and vLLM's profile run does not meet, since it leaves attention out.

Where vLLM profiles, a layer allocates here what it will need besides its output, so that the pool
of pages leaves room for it. What is counted is what the kernels for GPUs allocate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_h2o.kernels.programs import left_bytes, most_programs
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.traits import page_size
from vllm_h2o.pages import num_pages
from vllm_h2o.worker.batching import MAX_INDICES
from vllm_h2o.worker.memory_efficient import AMPERE
from vllm_h2o.worker.reconstruction import MAX_GATHERED

SURVIVORS = 64 << 20
"""Bytes of the slots of survivors that are listed at once: see triton/moving.py."""
READING = 6 * 4 * MAX_GATHERED
"""Bytes of a second reading's attention: K, V, queries, means of two parts, and of both."""

_KEPT: ContextVar[dict[str, torch.Tensor] | None] = ContextVar("vllm_h2o_kept", default=None)


@contextmanager
def profiling() -> Iterator[None]:
    """Keep until the end of this what layers keep for a whole step."""
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


@dataclass(frozen=True)
class Peak:
    """Memory of one layer.

    Args:
        max_len: tokens of the longest prompt whose scores lie outside the pages; 0: none do.
        max_tokens: of a step.
        rotates: whether a second pass rotates queries.
        gathered_len: slots of which K and V are gathered for xformers; 0: none are.
        shared_len: slots a KV head that a prompt keeps where heads share them; 0: they do not. All
            layers' together, where those share slots: then their survivors move at once.
        reads_again: whether prompts are read a second time.

    """

    max_len: int
    max_tokens: int
    rotates: bool
    gathered_len: int = 0
    shared_len: int = 0
    reads_again: bool = False

    @classmethod
    def of(cls, vllm_config: VllmConfig, config: KVPolicyConfig) -> Peak:
        """Read it from the engine's configuration."""
        model, shares = vllm_config.model_config, vllm_config.cache_config.enable_prefix_caching
        scores_outside = shares and model is not None and config.ranking.power > 0
        return cls(
            model.max_model_len if scores_outside else 0,
            vllm_config.scheduler_config.max_num_batched_tokens,
            config.ranking.term("rotated") is not None,
            model.max_model_len if model is not None and _gathers(config) else 0,
            _shared_len(vllm_config, config),
            config.ranking.term("reread") is not None,
        )

    def kept(self, num_kv_heads: int) -> int:
        """Bytes of a layer, from a step's beginning to its end: the scores of one longest prompt.

        Several that end in one step take more: of those only the tokens that are not in the prefix
        cache count in the step's budget.
        """
        return 4 * num_kv_heads * self.max_len

    def passing(self, num_heads: int, num_kv_heads: int, head_size: int, element_size: int) -> int:
        """Bytes that one layer, or the move of survivors, takes at once."""
        lse, queries = 4 * num_heads * self.max_tokens, num_heads * self.max_tokens * head_size
        # K and V in order; and V as its pages lie, or what xformers makes of them, twice.
        one = self.gathered_len * num_kv_heads * head_size * element_size
        gathered = 2 * one + max(one, 2 * queries * element_size) if one else 0
        rotated = 0
        if self.rotates:
            rotated = queries * element_size + lse
        read = READING + queries * element_size if self.reads_again else 0
        # K, V, score, position and the score that is kept, of one layer, or of all.
        shared = self.shared_len * num_kv_heads * (2 * head_size * element_size + 12)
        return max(lse + max(rotated, gathered, read), SURVIVORS + shared)

    def allocate(self, name: str, query: torch.Tensor, num_kv_heads: int) -> None:
        """Once for each layer, and only while vLLM profiles: what it keeps, and what it drops.

        Args:
            name: the layer's.
            query: [T, Hq, D], any.
            num_kv_heads: H.

        """
        held = _KEPT.get()
        if held is None or name in held:
            return
        _, num_heads, head_size = query.shape
        kept = self.kept(num_kv_heads)
        held[name] = torch.empty(kept, dtype=torch.uint8, device=query.device)
        passing = self.passing(num_heads, num_kv_heads, head_size, query.element_size())
        torch.empty(passing, dtype=torch.uint8, device=query.device)


def for_pages(available: int, vllm_config: VllmConfig, slot_bytes: int, num_layers: int) -> int:
    """Bytes of these that may be pages. On a GPU more lies next to them: logits of one layer's
    decode step, which may read any page, and a victim a page in each layer; what the programs of a
    step leave for others; with prefix caching each row's own pages.

    Args:
        available: bytes for both.
        vllm_config: of the engine.
        slot_bytes: of a slot of one KV head in one layer.
        num_layers: whose pages have one block id.

    """
    if not current_platform.is_cuda():
        return available
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    layers = 1 if KVPolicyConfig.required(vllm_config).splits_layers else num_layers
    group = model.get_num_attention_heads(parallel) // model.get_num_kv_heads(parallel)
    num_kv_heads, head_size = model.get_num_kv_heads(parallel), model.get_head_size()
    num_rows = vllm_config.scheduler_config.max_num_seqs
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    programs = most_programs(device.multi_processor_count, num_rows, num_kv_heads)
    available -= left_bytes(programs, group, head_size)
    num_slots = page_size(vllm_config)
    if vllm_config.cache_config.enable_prefix_caching:
        available -= 4 * num_rows * num_pages(model.max_model_len, num_slots) + 16 * MAX_INDICES
    pages, others = num_slots * slot_bytes * layers, 4 * (num_slots * group + layers)
    return available * pages // (pages + others)


def _shared_len(vllm_config: VllmConfig, config: KVPolicyConfig) -> int:
    """Slots a KV head in the largest budget that a request may ask for."""
    model, block_size = vllm_config.model_config, page_size(vllm_config)
    if model is None or not config.splits:
        return 0
    num_layers = model.get_num_layers(vllm_config.parallel_config) if config.splits_layers else 1
    budget = config.resolve(model.max_model_len, block_size, config.max_budget or "full")
    return num_layers * budget.capacity


def _gathers(config: KVPolicyConfig) -> bool:
    """Whether xformers may attend prompts, which does not read pages."""
    has_flash = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= AMPERE
    return config.kernels == "xformers" or not has_flash
