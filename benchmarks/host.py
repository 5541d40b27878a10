# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of a step on the host: ``python -m benchmarks.host``. No model runs.

vLLM's scheduler, stock and with the policy, schedules sequences that all generate; the policy's
worker turns the plan into what the kernels read. Processor time of one thread, which other work on
the machine does not change much; medians over steps.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.record import append_rows, machine_name
from benchmarks.throughput.models import write_random
from vllm_h2o.scheduler.scheduler import HeavyHitterScheduler
from vllm_h2o.scheduler.spec import HeavyHitterSpec
from vllm_h2o.wire import Plans
from vllm_h2o.worker.batching import PersistentBatch
from vllm_h2o.worker.step import Step

BLOCK_SIZE, PROMPT_LEN, MAX_MODEL_LEN = 32, 64, 2048
BUDGET = 128
PARTS = ("schedule", "update", "to_workers", "build")


class Host:
    """A scheduler whose requests all generate.

    Args:
        config: vLLM's.
        num_seqs: requests.

    """

    def __init__(self, config: VllmConfig, num_seqs: int) -> None:
        whole = MAX_MODEL_LEN // BLOCK_SIZE
        config.cache_config.num_gpu_blocks = num_blocks = 1 + num_seqs * whole
        config.cache_config.block_size = BLOCK_SIZE
        config.scheduler_config.async_scheduling = True  # the CPU platform forces it off
        spec = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.float32)
        policy = bool(config.additional_config)
        kind: type[Scheduler] = HeavyHitterScheduler if policy else AsyncScheduler
        group = KVCacheGroupSpec(["layer"], HeavyHitterSpec.of(spec) if policy else spec)
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks, [], [group]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )
        params = SamplingParams(max_tokens=MAX_MODEL_LEN - PROMPT_LEN, ignore_eos=True)
        for number in range(num_seqs):
            prompt = [number + 1] * PROMPT_LEN
            self.scheduler.add_request(
                Request(str(number), prompt, sampling_params=params, pooling_params=None)
            )

    def step(self, clock: Clock) -> SchedulerOutput:
        """Schedule a step and hand over a token of each request; both are timed."""
        with clock("schedule"):
            output = self.scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        index = {request_id: number for number, request_id in enumerate(ids)}
        sampled = ModelRunnerOutput(ids, index, [[7]] * len(ids))
        with clock("update"):
            self.scheduler.update_from_output(output, sampled)
        with clock("to_workers"):
            pickle.loads(pickle.dumps(output, protocol=pickle.HIGHEST_PROTOCOL))
        return output


class Clock:
    """Milliseconds of the processor, by name."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what is done meanwhile."""
        start = time.process_time()
        yield
        self.times.setdefault(name, []).append(1000 * (time.process_time() - start))

    def median(self, name: str) -> float | None:
        """Return a part's median over all steps; None without such a part."""
        return round(statistics.median(self.times[name]), 3) if name in self.times else None


def worker_side(num_seqs: int) -> Callable[[SchedulerOutput], object]:
    """Do a worker's part of a plan: rows in the batch's order, and one batch of them."""
    device = torch.device("cpu")
    batching = PersistentBatch(num_seqs, BLOCK_SIZE, device, prefix_caching=False)
    table = torch.zeros(num_seqs, MAX_MODEL_LEN // BLOCK_SIZE, dtype=torch.int32)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32)
    batch = {"query_start_loc_cpu": starts, "block_table_tensor": table, "num_reqs": num_seqs}
    common: Any = SimpleNamespace(**batch)
    order = [str(number) for number in range(num_seqs)]

    told = Plans()

    def build(output: SchedulerOutput) -> object:
        plan = told.complete(output.residency_plan)  # type: ignore[attr-defined]
        if output.total_num_scheduled_tokens != num_seqs:
            return None
        step = Step(plan, lambda _: order)
        return batching(step.rows(common))

    return build


def measure(num_seqs: int, num_steps: int) -> list[dict[str, Any]]:
    """A row for stock vLLM and one for the policy, steps of both in turn."""
    with tempfile.TemporaryDirectory() as folder:
        shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 1024}
        model = write_random(LlamaConfig(**shape, **heads), Path(folder))
        policy = {"kv_policy": {"name": "h2o", "budget": BUDGET}}
        hosts = {
            name: Host(_config(model, num_seqs, options), num_seqs)
            for name, options in (("stock vLLM", {}), ("h2o", policy))
        }
    build, clocks = worker_side(num_seqs), {name: Clock() for name in hosts}
    for number in range(BUDGET + num_steps):
        if number == BUDGET:  # every sequence has outgrown its budget
            clocks = {name: Clock() for name in hosts}
        for name, host in hosts.items():
            output = host.step(clocks[name])
            if name == "h2o":
                with clocks[name]("build"):
                    build(output)
    states = hosts["h2o"].scheduler.ledger.states.values()  # type: ignore[attr-defined]
    assert len(states) == num_seqs and all(state.is_full for state in states)
    return [
        {
            "machine": machine_name(),
            "vllm": version("vllm"),
            "side": name,
            "sequences": num_seqs,
            **{f"{part}_ms": clock.median(part) for part in PARTS},
        }
        for name, clock in clocks.items()
    ]


def _config(model: str, num_seqs: int, additional: dict[str, Any]) -> VllmConfig:
    return EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs * PROMPT_LEN,
        enable_prefix_caching=False,
        additional_config=additional,
    ).create_engine_config()


def main() -> None:
    """Measure, print, and append to a CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments.sequences, arguments.steps)
    for row in rows:
        print(*(f"{name}={value}" for name, value in row.items()))
    if arguments.csv:
        append_rows(arguments.csv, rows)


if __name__ == "__main__":
    main()
