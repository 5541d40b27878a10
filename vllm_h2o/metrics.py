# SPDX-License-Identifier: Apache-2.0
"""The policy's numbers in the front end: Prometheus metrics, and a line in vLLM's periodic log.

::

    scheduler: ledger, block manager -> StatsReporter --make_stats()--> vLLM's SchedulerStats
    front end: StatLoggerManager.record() -> PolicyStatLogger (first) -> vLLM's own loggers

Like vLLM's, a report has counts since the last report, and current levels. With several API servers
each report reaches one of them, so counters are summed, and the most recent gauge is shown.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.utils import create_metric_per_engine

from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.wire import PolicyStats

logger = init_logger("vllm.kv_policy")

COUNTERS = {
    "evicted_tokens": "Tokens evicted from the KV cache. Each layer with full attention and, on "
    "average, each KV head evicts this number; they are counted once.",
    "packs": "Number of compactions: at the end of a prompt, after its chunks (eviction=chunk), or "
    "during decode (evict_every, eviction=pressure).",
    "pages_freed_early": "KV-cache pages that requests freed while they ran.",
    "pressure_packs": "Number of compactions of requests that fell back to their budget because "
    "memory was short.",
    "pressure_evicted_tokens": "Tokens evicted by compactions because memory was short.",
    "continuation_queries": "With continuation: tokens of admitted requests.",
    "continuation_hits": "With continuation: tokens of admitted requests that came from an earlier "
    "turn's cache and were not computed again.",
    "continuation_misses": "With continuation: later turns that might have continued and did not: "
    "requests that begin with an earlier one's prompt, and then differ from its answer.",
    "continuation_host_hits": "With continuation=N: tokens of continuation_hits that host memory "
    "held.",
    "continuation_host_saves": "With continuation=N: earlier turns' caches copied to host memory, "
    "because the pool reused their pages.",
    "continuation_host_drops": "With continuation=N: earlier turns' caches that host memory "
    "dropped for others.",
    "continuation_folder_hits": "With continuation=/PATH: tokens of continuation_hits that files "
    "held.",
    "continuation_folder_saves": "With continuation=/PATH: caches sent to files, because a request "
    "asked for it or memory dropped them.",
    "continuation_folder_drops": "With continuation=/PATH: prompts whose files are gone, whoever "
    "removed them.",
}
"""Field of PolicyStats -> description of ``vllm:kv_policy_<field>_total``."""

GAUGES = {
    "requests_at_capacity": "Requests at their budget: new tokens evict others.",
    "resident_tokens": "Tokens in the KV cache of each layer with full attention.",
    "logical_tokens": "Tokens computed of the requests that hold pages: stock vLLM would hold all.",
    "saved_bytes": "Bytes of the pages that stock vLLM would hold for the logical tokens, without "
    "shared prefixes, less bytes of the pages held, with their scores and positions; on one "
    "worker. Negative if nothing is evicted.",
    "continuation_host_bytes": "With continuation=N: bytes of earlier turns' caches in the host "
    "memory of one worker.",
}
"""Field of PolicyStats -> description of ``vllm:kv_policy_<field>``."""


class PolicyStatLogger(AggregateStatLoggerBase):
    """Shows the scheduler's reports, and removes them from vLLM's statistics.

    Args:
        vllm_config: the engine's config, with a policy.
        engine_indexes: the engines that report to this process.

    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        config = KVPolicyConfig.required(vllm_config)
        self._policy, self._continues = config.name, config.continues
        # With several API servers each sees a part of the reports: vLLM logs no line either.
        self._logs = vllm_config.parallel_config._api_process_count == 1
        self._unsaid: dict[int, PolicyStats] = {}
        labels = {i: [vllm_config.model_config.served_model_name, str(i)] for i in engine_indexes}
        names = ["model_name", "engine"]
        self._counters = {
            field: create_metric_per_engine(
                Counter(f"vllm:kv_policy_{field}", documentation, names), labels
            )
            for field, documentation in COUNTERS.items()
        }
        self._gauges = {
            field: create_metric_per_engine(
                Gauge(
                    f"vllm:kv_policy_{field}", documentation, names, multiprocess_mode="mostrecent"
                ),
                labels,
            )
            for field, documentation in GAUGES.items()
        }

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take the policy's numbers out of ``scheduler_stats``, and export them."""
        if scheduler_stats is None:
            return
        stats = PolicyStats.take_from(scheduler_stats.running_lora_adapters)
        if stats is None:
            return
        for field, counters in self._counters.items():
            counters[engine_idx].inc(getattr(stats, field))
        for field, gauges in self._gauges.items():
            gauges[engine_idx].set(getattr(stats, field))
        if before := self._unsaid.get(engine_idx):
            sums = {field: getattr(before, field) + getattr(stats, field) for field in COUNTERS}
            stats = replace(stats, **sums)
        self._unsaid[engine_idx] = stats

    def log(self) -> None:
        """Log one line for each engine that has reported since the last line."""
        said = sorted(self._unsaid.items()) if self._logs else ()
        for engine_idx, stats in said:
            logger.info(
                "Engine %03d: KV policy %s: %d requests at capacity, %d of %d tokens resident, "
                "%d evicted, %d pages freed early, %.1f MiB saved",
                engine_idx,
                self._policy,
                stats.requests_at_capacity,
                stats.resident_tokens,
                stats.logical_tokens,
                stats.evicted_tokens,
                stats.pages_freed_early,
                stats.saved_bytes / 2**20,
            )
            if self._continues:
                logger.info(
                    "Engine %03d: KV policy %s: %d of %d admitted tokens continued, "
                    "%d later turns might have continued and did not",
                    engine_idx,
                    self._policy,
                    stats.continuation_hits,
                    stats.continuation_queries,
                    stats.continuation_misses,
                )
        self._unsaid.clear()

    def log_engine_initialized(self) -> None:
        """Log nothing: the scheduler has logged the budget."""
