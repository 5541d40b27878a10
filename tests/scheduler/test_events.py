# SPDX-License-Identifier: Apache-2.0
"""KV cache events, replayed by a router, equal the prefixes in the pool."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

from tests.draws import drawn, seen_by_all
from tests.scheduler.harness import Simulation, vllm_config
from tests.scheduler.schedules import PREFIXES, SNAPKV, Schedule, overlaps, schedules

totals: Counter[str] = Counter()


class Router(Simulation):
    """Replays what the scheduler publishes, and compares it with the pool."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.known: Counter[object] = Counter()
        self.scheduler.kv_event_publisher.publish = self.replay

    def replay(self, batch: KVEventBatch) -> None:
        """Take in a batch of events."""
        for event in batch.events:
            totals[type(event).__name__] += 1
            match event:
                case BlockStored():
                    self.known.update(event.block_hashes)
                case BlockRemoved():
                    self.known.subtract(event.block_hashes)
                case AllBlocksCleared():
                    self.known.clear()

    def deliver(self) -> None:
        """Deliver the oldest step's tokens; then all that is published is what is there."""
        super().deliver()
        self.replay(KVEventBatch(0.0, self.scheduler.kv_cache_manager.take_events() or []))
        there: Counter[object] = Counter()
        pool = self.scheduler.kv_cache_manager.block_pool
        for key, found in pool.cached_block_hash_to_block._cache.items():
            blocks = len(found) if isinstance(found, dict) else 1
            there[maybe_convert_block_hash(get_block_hash(key))] += blocks
        assert +self.known == there


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
    config = vllm_config(12, 20, 8, schedule.policy, overlap[1], options)
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    totals.update(schedule.play(Router, config, schedule.num_blocks(num_pages), overlap[0]).count)


def test_events_replayed_equal_the_pool() -> None:
    """After every step, and each kind of event did happen."""
    totals.clear()
    random_schedules()
    least = seen_by_all(1)
    for what in ("hit", "pack", "preempt", "BlockStored", "BlockRemoved", "AllBlocksCleared"):
        assert totals[what] >= least, totals
