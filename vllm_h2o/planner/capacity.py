# SPDX-License-Identifier: Apache-2.0
"""Count the sequences that fit into a memory, with stock vLLM and with each budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.policy import Budget
from vllm_h2o.scheduler.footprint import CacheShape, Pool


@dataclass(frozen=True)
class Workload:
    """The sequences that the engine holds, and its pages.

    Args:
        max_model_len: longest sequence, in tokens.
        prompt_len: longest prompt, in tokens.
        block_size: slots of a page; beside states, which pages cover, what divides them.
        max_num_batched_tokens: most tokens of one step; read with ``eviction=chunk``, and with
            sliding windows.
        in_flight: steps in flight, two with asynchronous scheduling; read with sliding windows.

    """

    max_model_len: int
    prompt_len: int
    block_size: int
    max_num_batched_tokens: int
    in_flight: int = 2


@dataclass(frozen=True)
class Row:
    """One engine.

    Args:
        label: its name in the table.
        pool: the pages of its memory.
        slots: most slots of a sequence past its prompt.
        slot_bytes: bytes of a slot.
        prompt_slots: most slots of the longest prompt until its end.
        start_slots: slots that vLLM needs before it starts.
        other_pages: pages of a sequence past its prompt in layers of other kinds.
        other_start_pages: pages in these layers that vLLM needs before it starts.

    """

    label: str
    pool: Pool
    slots: int
    slot_bytes: int
    prompt_slots: int
    start_slots: int
    other_pages: int = 0
    other_start_pages: int = 0

    @property
    def pages(self) -> int:
        """Pages of a sequence past its prompt."""
        return self.pool.pages_of(self.slots) + self.other_pages

    @property
    def prompt_pages(self) -> int:
        """Most pages of the longest prompt until its end."""
        return self.pool.pages_of(self.prompt_slots) + self.other_start_pages

    @property
    def start_pages(self) -> int:
        """Pages of the longest sequence, which vLLM needs before it starts."""
        return self.pool.pages_of(self.start_slots) + self.other_start_pages

    @property
    def num_bytes(self) -> int:
        """Bytes of a sequence past its prompt."""
        return self.pages * self.pool.block_size * self.slot_bytes

    @property
    def sequences(self) -> int:
        """Sequences past their prompts that fit at once."""
        return self.pool.num_sequences(self.slots, self.other_pages)

    @property
    def sequences_with_a_prompt(self) -> int:
        """Sequences that fit while one of them is a prompt just before its end."""
        peak = max(self.prompt_pages, self.pages)
        left = self.pool.num_pages - peak
        return 0 if left < 0 else 1 + left // self.pages

    @property
    def starts(self) -> bool:
        """Whether vLLM starts: it needs room for one longest sequence."""
        return self.pool.num_pages >= self.start_pages

    @property
    def concurrency(self) -> float:
        """The maximum concurrency that vLLM logs."""
        return self.pool.num_blocks / self.start_pages


def _other_pages(pool: Pool, shape: CacheShape, work: Workload) -> tuple[int, int]:
    """Return the other pages of a sequence past its prompt, and of one before vLLM starts."""
    longest, chunks = work.max_model_len, work.in_flight * work.max_num_batched_tokens
    return (
        pool.pages_of_windows(shape.windows, longest, work.in_flight) + shape.num_states,
        pool.pages_of_windows_in_prompts(shape.windows, longest, chunks) + shape.num_states,
    )


def stock_row(shape: CacheShape, memory: int, work: Workload) -> Row:
    """Count for stock vLLM.

    Args:
        shape: the model's cache.
        memory: bytes for the cache.
        work: the sequences.

    """
    slot_bytes, longest = shape.stock_slot_bytes, work.max_model_len
    pool = shape.pool(memory, work.block_size, slot_bytes)
    others = _other_pages(pool, shape, work)
    return Row("stock vLLM", pool, longest, slot_bytes, work.prompt_len, longest, *others)


def policy_row(shape: CacheShape, memory: int, work: Workload, config: KVPolicyConfig) -> Row:
    """Count for an engine with a policy.

    Args:
        shape: the model's cache.
        memory: bytes for the cache.
        work: the sequences.
        config: the policy.

    Raises:
        ConfigError: when the budget has too few slots.

    """
    slot_bytes = shape.slot_bytes(config.extra_words)
    pool = shape.pool(memory, work.block_size, slot_bytes)
    config.check(work.max_model_len, pool.block_size)
    budget = config.resolve(work.max_model_len, pool.block_size)
    longest, prompt = work.max_model_len, work.prompt_len
    if config.eviction == "chunk":
        limit = budget.most_slots(work.max_num_batched_tokens)
        longest, prompt = min(longest, limit), min(prompt, limit)
    slots = min(_own(config, work, pool.block_size, budget).capacity, work.max_model_len)
    others = _other_pages(pool, shape, work)
    return Row(_label(config), pool, slots, slot_bytes, prompt, longest, *others)


def plan(
    shape: CacheShape, memory: int, work: Workload, configs: Sequence[KVPolicyConfig]
) -> list[Row]:
    """Count for stock vLLM, and for each policy; with ``eviction=pressure`` before and after it.

    Args:
        shape: the model's cache.
        memory: bytes for the cache.
        work: the sequences.
        configs: the policies.

    Raises:
        ConfigError: when a budget has too few slots.

    """
    rows = [policy_row(shape, memory, work, config) for config in configs]
    # While there is room every token stays, whatever the budget: one row for all.
    whole = [
        replace(row, label=f"{config.name}, all kept", slots=work.max_model_len)
        for config, row in zip(configs[:1], rows, strict=False)
        if config.eviction == "pressure"
    ]
    return [stock_row(shape, memory, work), *whole, *rows]


def _own(config: KVPolicyConfig, work: Workload, block_size: int, budget: Budget) -> Budget:
    """Return the budget of a request with the longest prompt."""
    rest = work.max_model_len - work.prompt_len
    own = config.resolve_request(work.max_model_len, block_size, work.prompt_len, rest)
    return own or budget


def _label(config: KVPolicyConfig) -> str:
    if not config.policy.evicts:
        return config.name
    if isinstance(config.budget, float):
        return f"{config.name} {100 * config.budget:g} %"
    return f"{config.name} {config.budget}{' tokens' if isinstance(config.budget, int) else ''}"
