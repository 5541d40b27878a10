# SPDX-License-Identifier: Apache-2.0
"""A simulation that counts by itself what the metrics say, and compares after every step."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from tests.scheduler.harness import Simulation
from vllm_h2o.wire import RequestPlan

COUNTERS = (
    "evicted_tokens",
    "packs",
    "pages_freed_early",
    "pressure_packs",
    "pressure_evicted_tokens",
)


class Observed(Simulation):
    """Counts what was executed; ``levels`` adds up what was shown after every step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plans: dict[str, RequestPlan] = {}
        self.counted: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.reported = Counter(self.counted)
        self.levels: Counter[str] = Counter()
        kv_cache_manager = self.scheduler.kv_cache_manager
        step_starts = kv_cache_manager.new_step_starts

        def measured() -> None:
            before = self.num_free
            step_starts()
            self.counted["pages_freed_early"] += self.num_free - before

        kv_cache_manager.new_step_starts = measured

    def step(self) -> Any:
        """One step; what is reported then is what there is."""
        output = super().step()
        plans = output.residency_plan.requests
        self.plans |= plans
        self.counted["evicted_tokens"] = self.pool.num_gone
        self.counted["packs"] += sum(plan.num_survivors > 0 for plan in plans.values())
        behind = [
            plan
            for plan in plans.values()
            if plan.num_survivors and plan.grows and not plan.in_prompt
        ]
        self.counted["pressure_packs"] += len(behind)
        self.counted["pressure_evicted_tokens"] += sum(
            plan.resident_start + 1 - plan.num_survivors for plan in behind
        )
        self.compare()
        return output

    def compare(self) -> None:
        """Ask for a report."""
        stats = asdict(self.scheduler.stats_reporter.report())
        self.reported.update({name: stats.pop(name) for name in COUNTERS})
        assert dict(self.reported) == dict(self.counted)
        assert stats == self._levels()
        self.levels.update(stats)

    def _is_full(self, request_id: str) -> bool:
        plan = self.plans[request_id]
        request = self.scheduler.requests[request_id]
        ends = plan.prompt_end + 1 >= request.num_prompt_tokens + request.max_tokens
        if ends and request_id not in self.scheduler.ledger.resumed:
            return False  # it ends with its prompt
        if plan.budget.evict_every == 1:
            is_full = plan.attended_len == plan.budget.capacity
            return is_full and not plan.in_prompt and not plan.grows
        # It has lost tokens, and loses more whenever all slots are taken.
        ended = plan.logical_end >= plan.prompt_end and (plan.num_survivors > 0 or not plan.grows)
        return ended and plan.logical_end > plan.resident_end

    def _levels(self) -> dict[str, int]:
        """From vLLM's requests and pages, and from the slots."""
        scheduler, size = self.scheduler, self.pool.block_size
        with_pages = [i for i in scheduler.requests if self.pages_of(i)]
        computed = {i: scheduler.requests[i].num_computed_tokens for i in with_pages}
        # One KV head of 32 + 32 floats of four bytes a slot, and eight bytes for the policy.
        others = scheduler.other_groups.num_held()
        stock = (sum(-(-tokens // size) for tokens in computed.values()) + others) * size * 256
        held = (self.num_total - self.num_free) * size * 264
        return {
            "continuation_queries": 0,  # no request continues here
            "continuation_hits": 0,
            "continuation_misses": 0,
            "continuation_host_hits": 0,
            "continuation_host_saves": 0,
            "continuation_host_drops": 0,
            "continuation_host_bytes": 0,
            "continuation_folder_hits": 0,
            "continuation_folder_saves": 0,
            "continuation_folder_drops": 0,
            "requests_at_capacity": sum(map(self._is_full, with_pages)),
            "resident_tokens": sum(
                position < computed[i]  # no draft that has been rejected by now
                for i in with_pages
                for position in self.pool.held[i][1]
            ),
            "logical_tokens": sum(computed.values()),
            "saved_bytes": stock - held,
        }
