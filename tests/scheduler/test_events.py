# SPDX-License-Identifier: Apache-2.0
"""KV cache events, replayed by a router, equal the prefixes in the pool, and the entries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.config import KVEventsConfig, VllmConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_block_hash,
    get_request_block_hasher,
    maybe_convert_block_hash,
)
from vllm.v1.request import Request

from tests.draws import draw_until_seen, drawn
from tests.scheduler.conversations import (
    ON,
    TENANTS,
    Talking,
    Tenant,
    entries_of,
    first_turn,
)
from tests.scheduler.harness import BLOCK_SIZE, Simulation, vllm_config
from tests.scheduler.schedules import (
    OPTIONS,
    PREFIXES,
    SNAPKV,
    Schedule,
    conversations,
    overlaps,
    schedules,
    states,
    step_tokens,
)
from vllm_h2o.scheduler.events import MEDIUM

GPU = "GPU"
"""Medium of vLLM's prefix cache."""
totals: Counter[str] = Counter()


def with_events(config: VllmConfig) -> VllmConfig:
    """The same engine, which publishes events."""
    config = copy(config)  # others have it, too
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return config


class Router(Simulation):
    """Replays what the scheduler publishes, and compares it with the pool."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.known: Counter[tuple[str | None, object]] = Counter()
        self.published: list[object] = []
        self.scheduler.kv_event_publisher.publish = self.replay

    def replay(self, batch: KVEventBatch) -> None:
        """Take in a batch of events."""
        self.published += batch.events
        for event in batch.events:
            match event:
                case AllBlocksCleared():
                    totals["AllBlocksCleared"] += 1
                    self.known.clear()
                case BlockStored() | BlockRemoved():
                    totals[f"{type(event).__name__} {event.medium}"] += 1
                    sign = 1 if isinstance(event, BlockStored) else -1
                    for block_hash in event.block_hashes:
                        self.known[event.medium, block_hash] += sign

    def compare(self) -> None:
        """All that is published is what is there; nothing is removed twice."""
        self.replay(KVEventBatch(0.0, self.scheduler.kv_cache_manager.take_events() or []))
        assert self.known == self.there()

    def there(self) -> Counter[tuple[str | None, object]]:
        """What vLLM's prefix cache holds."""
        there: Counter[tuple[str | None, object]] = Counter()
        pool = self.scheduler.kv_cache_manager.block_pool
        for key, found in pool.cached_block_hash_to_block._cache.items():
            blocks = len(found) if isinstance(found, dict) else 1
            there[GPU, maybe_convert_block_hash(get_block_hash(key))] += blocks
        return there

    def deliver(self) -> None:
        """Deliver the oldest step's tokens."""
        super().deliver()
        self.compare()

    def abort(self, request_ids: Any) -> None:
        """Abort requests; their blocks go, or stay."""
        super().abort(request_ids)
        self.compare()

    def reset(self) -> None:
        """Reset the cache: nothing is there."""
        super().reset()
        self.compare()
        assert not +self.known


class TalkingRouter(Router, Talking):
    """Knows the hashes that a router computes of the texts that have been said, by tenant."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hash = get_request_block_hasher(self.scheduler.block_manager.block_size, sha256)
        self.prompts: dict[Tenant, list[list[BlockHash]]] = {}

    def remember(self) -> None:
        """Hash each new text as the prompt of a later turn."""
        known = len(self.said)
        super().remember()
        for tenant, text in self.said[known:]:
            later = Request("", text, SamplingParams(), None, cache_salt=tenant.salt)
            later.lora_request = tenant.adapter and LoRARequest(tenant.adapter, 1, "/nowhere")
            self.prompts.setdefault(tenant._replace(budget=None), []).append(self.hash(later))

    def there(self) -> Counter[tuple[str | None, object]]:
        """What the prefix cache holds, and the whole blocks of each entry."""
        self.remember()
        there = super().there()
        for entry in entries_of(self)._entries.values():
            num_blocks = entry.turn.logical_len // self.scheduler.block_manager.block_size
            _, (last, _), _ = entry.name
            every = (chain for chains in self.prompts.values() for chain in chains)
            longer = (chain for chain in every if len(chain) >= num_blocks)
            if num_blocks:
                chain = next(chain for chain in longer if chain[num_blocks - 1] == last)
                there.update((MEDIUM, maybe_convert_block_hash(h)) for h in chain[:num_blocks])
        return there


@drawn(200)
@given(
    schedule=schedules(),
    options=st.sampled_from(
        [
            (PREFIXES, *SNAPKV),
            (PREFIXES, *SNAPKV, ("evict_every", 6)),
            (PREFIXES, ("name", "streaming"), ("num_sink_tokens", 2)),
        ]
    ),
    num_pages=st.integers(16, 30),
    overlap=overlaps,
)
def random_schedules(
    schedule: Schedule,
    options: tuple[tuple[str, object], ...],
    num_pages: int,
    overlap: tuple[int, bool],
) -> None:
    """Prompts that share beginnings, in pools that overflow."""
    config = with_events(vllm_config(12, 20, 8, schedule.policy, overlap[1], options))
    totals.update(schedule.play(Router, config, schedule.num_blocks(num_pages), overlap[0]).count)


def test_events_replayed_equal_the_pool() -> None:
    """After every step, and each kind of event did happen."""
    events = (f"BlockStored {GPU}", f"BlockRemoved {GPU}", "AllBlocksCleared")
    seen = ("hit", "pack", "preempt", *events)
    draw_until_seen(random_schedules, totals, dict.fromkeys(seen, 20))


@drawn(200)
@given(
    schedule=schedules(ops=conversations),
    options=st.sampled_from([*OPTIONS, (PREFIXES, *SNAPKV, ("num_sink_tokens", 3))]),
    num_pages=st.sampled_from([16, 20, 60]),
    overlap=overlaps,
    num_states=st.sampled_from([0, 0, 1]),
)
def random_conversations(
    schedule: Schedule,
    options: tuple[tuple[str, object], ...],
    num_pages: int,
    overlap: tuple[int, bool],
    num_states: int,
) -> None:
    """Turns of several tenants, in pools that hold all entries, or few; some beside states."""
    budget = 12
    beside = states(num_states, options)
    if ("evict_every", "page") in options:
        budget, num_pages = 32, max(num_pages, 20)
    tokens = step_tokens(20, options)
    config = vllm_config(budget, tokens, 8, schedule.policy, overlap[1], (ON, *options))
    num_blocks = schedule.num_blocks(num_pages) + len(beside)
    router = schedule.play(TalkingRouter, with_events(config), num_blocks, overlap[0], beside)
    totals.update(router.count)
    totals["beside states"] += len(router.published) if beside else 0


def test_events_replayed_equal_the_entries() -> None:
    """After every step, abort and reset; each kind of event did happen, beside vLLM's own."""
    events = (f"BlockStored {GPU}", f"BlockStored {MEDIUM}", f"BlockRemoved {MEDIUM}")
    seen = ("continue", "preempt", "abort", "AllBlocksCleared", "beside states", *events)
    draw_until_seen(random_conversations, totals, dict.fromkeys(seen, 20))


def talk(num_blocks: int = 200) -> TalkingRouter:
    """Conversations without prefix caching."""
    return TalkingRouter(with_events(vllm_config(12, 64, 8, "fcfs", False, (ON,))), num_blocks, 1)


@pytest.mark.parametrize("tenant", TENANTS)
def test_entry_event_names_what_a_router_hashes(tenant: Tenant) -> None:
    """One event of all whole blocks of its tokens, with salt and adapter where vLLM has them."""
    router = talk()
    text = first_turn(router, tenant)
    (event,) = router.published
    assert isinstance(event, BlockStored)
    length = (len(text) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert event.token_ids == text[:length]
    assert (event.parent_block_hash, event.block_size) == (None, BLOCK_SIZE)
    assert (event.medium, event.group_idx) == (MEDIUM, 0)
    assert event.kv_cache_spec_kind == "full_attention"
    assert event.lora_name == tenant.adapter
    keys = [key for key in (tenant.adapter, tenant.salt) if key]
    assert event.extra_keys is not None
    assert [*(event.extra_keys[0] or ())] == keys
    assert [*(event.extra_keys[1] or ())] == [key for key in (tenant.adapter,) if key]


def reuse(router: TalkingRouter) -> None:
    """Take pages from the pool, the last of them an entry's."""
    (entry,) = entries_of(router)._entries.values()
    pool = router.scheduler.block_manager.block_pool
    others = pool.get_num_free_blocks() - len(entry.blocks)
    pool.free_blocks(pool.get_new_blocks(others))
    assert entry in entries_of(router)._entries.values()
    pool.free_blocks(pool.get_new_blocks(others + 1))


def change(router: TalkingRouter) -> None:
    """Replace the model's weights."""
    entries_of(router).weights.call("reload_weights")


GONE: dict[Callable[[TalkingRouter], None], list[type]] = {
    reuse: [BlockRemoved],
    change: [BlockRemoved],
    TalkingRouter.reset: [BlockRemoved, AllBlocksCleared],
}


@pytest.mark.parametrize("act", GONE, ids=lambda act: act.__name__)
def test_entry_that_goes_is_published_once(act: Callable[[TalkingRouter], None]) -> None:
    """Its removal comes before the cache is cleared, and never again."""
    router = talk()
    first_turn(router)
    router.published.clear()
    act(router)
    router.compare()
    assert [type(event) for event in router.published] == GONE[act]
    assert not +router.known
    first_turn(router)  # other pages, or the same ones
    reset = router.scheduler.reset_prefix_cache
    assert reset() and reset()
    router.compare()


def test_events_off_leave_the_queue_empty() -> None:
    """Nothing is hashed for them, queued or kept."""
    talking = Talking(vllm_config(12, 64, 8, "fcfs", False, (ON,)), 200, 1)
    first_turn(talking)
    assert entries_of(talking)._events is None
    assert not talking.scheduler.block_manager.block_pool.kv_event_queue
