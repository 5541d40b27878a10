# SPDX-License-Identifier: Apache-2.0
"""Reports counts since the last report, and current levels."""

from __future__ import annotations

from dataclasses import asdict

from vllm_h2o.scheduler.block_manager import HeavyHitterManager
from vllm_h2o.scheduler.conversations import Conversations
from vllm_h2o.scheduler.other_groups import OtherGroups
from vllm_h2o.scheduler.spec import HeavyHitterSpec
from vllm_h2o.scheduler.state import LedgerStats
from vllm_h2o.wire import PolicyStats


class StatsReporter:
    """Adds up the numbers of ledger, block manager and conversations.

    Args:
        manager: the block manager; its ledger must be bound.
        num_layers: layers whose pages one block id names, on one worker.
        other_groups: the groups that vLLM manages.
        conversations: the book of entries; None: there are none.

    """

    def __init__(
        self,
        manager: HeavyHitterManager,
        num_layers: int,
        other_groups: OtherGroups,
        conversations: Conversations | None = None,
    ) -> None:
        spec = manager.kv_cache_spec
        assert isinstance(spec, HeavyHitterSpec)
        self._manager, self._other_groups = manager, other_groups
        self._conversations = conversations
        self._page_bytes = spec.page_size_bytes * num_layers
        self._stock_page_bytes = spec.stock_page_size_bytes * num_layers

    def report(self) -> PolicyStats:
        """Count since the last call, and measure levels now.

        Bytes are of one worker; with tensor parallelism each saves the same.
        """
        manager, ledger = self._manager, self._manager.ledger
        stats, ledger.stats = ledger.stats, LedgerStats()
        # Stock vLLM holds the same pages of windows and states, without room for scores.
        others = self._other_groups.num_held()
        at_capacity = resident = logical = 0
        counts = {}
        if entries := self._conversations:
            counts = entries.take_counts()
            counts["continuation_host_bytes"] = entries.host.num_used * self._page_bytes
        stock_pages, pages = others, manager.num_held() + others
        for held in ledger.states.values():  # in one pass, because it runs after every step
            at_capacity += held.is_full
            resident += held.resident_len
            logical += held.logical_len
            stock_pages += ledger.num_pages(held.logical_len)
        return PolicyStats(
            **asdict(stats),
            **counts,
            requests_at_capacity=at_capacity,
            resident_tokens=resident,
            logical_tokens=logical,
            saved_bytes=stock_pages * self._stock_page_bytes - pages * self._page_bytes,
        )
