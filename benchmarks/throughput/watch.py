# SPDX-License-Identifier: Apache-2.0
"""``vllm bench throughput`` in this process, with the steps of its engine written down.

Usage::

    python -m benchmarks.throughput.watch OUT.json --model ... (any option of the bench)

What is watched is what vLLM's own statistics say after each step, in the front-end process.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from vllm_h2o.wire import PolicyStats


@dataclass
class Watch:
    """Figures of the engine's steps.

    Args:
        times: when each step's output came, seconds.
        running: sequences that were running, by step.
        generated: tokens generated, by step.
        peak_usage: largest share of the pool that was held.
        preemptions: sequences thrown out, to be computed again.
        evicted_tokens: as the policy's metrics count them; 0 for stock vLLM.
        pressure_packs: likewise.
        drafted: tokens that were proposed by speculation.
        accepted: those of them that were right.

    """

    times: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    peak_usage: float = 0.0
    preemptions: int = 0
    evicted_tokens: int = 0
    pressure_packs: int = 0
    drafted: int = 0
    accepted: int = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """One step."""
        if scheduler_stats is None or iteration_stats is None:
            return
        self.times.append(time.perf_counter())
        self.running.append(scheduler_stats.num_running_reqs)
        self.generated.append(iteration_stats.num_generation_tokens)
        self.peak_usage = max(self.peak_usage, scheduler_stats.kv_cache_usage)
        self.preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats.spec_decoding_stats is not None:
            self.drafted += scheduler_stats.spec_decoding_stats.num_draft_tokens
            self.accepted += scheduler_stats.spec_decoding_stats.num_accepted_tokens
        # A copy: the policy's own logger takes its numbers out later.
        policy = PolicyStats.take_from(dict(scheduler_stats.running_lora_adapters))
        if policy is not None:
            self.evicted_tokens += policy.evicted_tokens
            self.pressure_packs += policy.pressure_packs

    def step_seconds(self) -> float:
        """Median time of the steps in which as many tokens came as in any: decoding at full width.

        0 when there were fewer than two.
        """
        most = max(self.generated, default=0)
        spans = [
            self.times[i] - self.times[i - 1]
            for i in range(1, len(self.times))
            if self.generated[i] == self.generated[i - 1] == most
        ]
        return statistics.median(spans) if spans else 0.0

    def summary(self) -> dict[str, float]:
        """The figures."""
        busy = [count for count in self.generated if count]
        return {
            "mean_sequences": statistics.mean(busy) if busy else 0.0,
            "peak_sequences": max(self.running, default=0),
            "peak_usage": self.peak_usage,
            "preemptions": self.preemptions,
            "evicted_tokens": self.evicted_tokens,
            "pressure_packs": self.pressure_packs,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "step_seconds": self.step_seconds(),
        }


@contextmanager
def watching() -> Iterator[Watch]:
    """Also send vLLM's statistics to a watch until the context ends."""
    from vllm.v1.metrics.loggers import StatLoggerManager

    watch, original = Watch(), StatLoggerManager.record

    def record(self: Any, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kw: Any) -> Any:
        watch.record(scheduler_stats, iteration_stats)
        return original(self, scheduler_stats, iteration_stats, *args, **kw)

    with mock.patch.object(StatLoggerManager, "record", record):
        yield watch


def keep_digests(throughput: Any) -> list[str]:
    """Have the bench's texts told apart: four hexadecimal digits of each, in the prompts' order.

    Args:
        throughput: vLLM's module.

    Returns:
        A list that is filled when the bench has run.

    """
    original = throughput.run_vllm
    digests: list[str] = []

    def run_vllm(*args: Any, **kw: Any) -> Any:
        seconds, outputs = original(*args, **kw)
        texts = (repr(list(out.outputs[0].token_ids)) for out in outputs)
        digests.extend(hashlib.sha256(text.encode()).hexdigest()[:4] for text in texts)
        return seconds, outputs

    throughput.run_vllm = run_vllm
    return digests


def main() -> None:
    """Run the bench and write its figures beside the watched ones."""
    out, options = Path(sys.argv[1]), sys.argv[2:]
    from vllm.benchmarks import throughput
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    throughput.add_cli_args(parser)
    args = parser.parse_args([*options, "--output-json", str(out)])
    digests = keep_digests(throughput)
    with watching() as watch:
        throughput.main(args)
    figures = {**json.loads(out.read_text()), **watch.summary(), "digests": digests}
    out.write_text(json.dumps({**figures, "watch": asdict(watch)}))


if __name__ == "__main__":
    main()
