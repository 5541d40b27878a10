"""What the policy has done since the last report, and how things stand."""

from __future__ import annotations

from dataclasses import asdict

from vllm_h2o.scheduler.manager import HeavyHitterManager
from vllm_h2o.scheduler.spec import HeavyHitterSpec
from vllm_h2o.scheduler.state import LedgerStats
from vllm_h2o.scheduler.windows import Windows
from vllm_h2o.wire import PolicyStats


class StatsReporter:
    """Adds up, when it is asked, what ledger and manager know.

    Args:
        manager: the pages; its ledger must be bound.
        num_layers: layers whose pages one block id names, on one worker.
        windows: the groups of layers with a sliding window.

    """

    def __init__(self, manager: HeavyHitterManager, num_layers: int, windows: Windows) -> None:
        spec = manager.kv_cache_spec
        assert isinstance(spec, HeavyHitterSpec)
        self._manager, self._windows = manager, windows
        self._page_bytes = spec.page_size_bytes * num_layers
        self._stock_page_bytes = spec.stock_page_size_bytes * num_layers

    def report(self) -> PolicyStats:
        """What has happened since the last call, and how things stand now.

        Bytes are those of one worker: with tensor parallelism, each saves as many.
        """
        manager, ledger = self._manager, self._manager.ledger
        stats, ledger.stats = ledger.stats, LedgerStats()
        held = ledger.states.values()
        # Of windows stock holds as many, without room for scores.
        others = self._windows.num_held()
        stock_pages = sum(ledger.num_pages(state.logical_len) for state in held) + others
        pages = manager.num_held() + others
        return PolicyStats(
            **asdict(stats),
            requests_at_capacity=sum(state.is_full for state in held),
            resident_tokens=sum(map(ledger.resident_tokens, held)),
            logical_tokens=sum(state.logical_len for state in held),
            saved_bytes=stock_pages * self._stock_page_bytes - pages * self._page_bytes,
        )
