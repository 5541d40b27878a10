# SPDX-License-Identifier: Apache-2.0
"""One engine and what it is asked, the same for either model runner; what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from vllm import LLM, RequestOutput, SamplingParams
from vllm.config import VllmConfig

from tests.e2e.conversations import ConversationOracle
from tests.e2e.gpu_runner import graphs
from tests.e2e.harness import Probe, engine
from vllm_h2o.kernels.triton.kernels import TritonKernels
from vllm_h2o.wire import RequestPlan
from vllm_h2o.worker import batching
from vllm_h2o.worker.seeds import KeepsSeeds
from vllm_h2o.worker.step import PublishesSteps

SETTINGS: dict[str, Any] = {
    "block_size": 16,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "async_scheduling": True,
}
"""Of an engine: pages of 16 tokens, four rows, prompts in chunks, ahead of the tokens."""
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 4],
    },
}
"""Of an engine: decode-only batches in full CUDA graphs, of one row and of four."""

V1 = "vllm.v1.worker.gpu_model_runner"


@dataclass
class Job:
    """What travels to the process with Model Runner V2.

    Args:
        model: folder.
        policy: name; None: stock vLLM.
        options: of the policy.
        prompts: of the requests.
        max_tokens: of each request.
        arrivals: engine step in which each request arrives; empty: all at once. When the engine has
            nothing to do, the next one arrives.
        aborts: engine step after which a request is aborted, by its index, as text.
        settings: further arguments of the engine.
        triton: compute with the kernels for GPUs.
        follow: compare with the reference after every step.
        record: return what the pages held.
        forgetful: fill a batch's buffer anew for each step, where no graph looks.
        depth: steps that may be in flight; 0: as many as vLLM allows.

    """

    model: str
    policy: str | None
    options: dict[str, Any] | None
    prompts: list[list[int]]
    max_tokens: int = 12
    arrivals: list[int] = field(default_factory=list)
    aborts: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    triton: bool = False
    follow: bool = False
    record: bool = False
    forgetful: bool = False
    depth: int = 0


@dataclass
class Outcome:
    """What travels back.

    Args:
        runner: the model runner's module.
        tokens: of each request; of an aborted one those until then.
        cached: tokens of each prompt that were found in the prefix cache, or continued from.
        held: with ``record``, by request index and logical length: positions, as many numbers for
            each layer and KV head.
        in_flight: the most steps that were scheduled and whose tokens nobody knew.
        preemptions: of requests.
        compared: retained sets that were compared with the reference.
        victims: victims that were.
        ties: victims that differ, between scores that float32 may order either way.
        max_error: largest difference of an attention output from the reference's.
        accepted: drafts that were accepted, and followed.
        rejected: drafts that were rejected.
        replays: of graphs.
        packed_after_graphs: packings of steps that replayed one.
        known: by request index, the first token as it lay on the host before its prompt was packed.
        pages: free in the end, and in all.

    """

    runner: str
    tokens: list[list[int]]
    cached: list[int]
    held: dict[str, list[list[int]]]
    in_flight: int
    preemptions: int
    compared: int
    victims: int
    ties: int
    max_error: float
    accepted: int
    rejected: int
    replays: int
    packed_after_graphs: int
    known: dict[str, int]
    pages: list[int]


def run(job: Job) -> Outcome:
    """Start an engine, ask it, and see what came of it."""
    replays = graphs.Graph.num_replays
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if job.triton:
            patch.setattr("vllm_h2o.worker.metadata.select_kernels", _triton)
        if job.forgetful:
            stack.enter_context(_forgetful())
        if job.depth:
            patch.setattr(VllmConfig, "max_concurrent_batches", job.depth)
        settings = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 64, **job.settings}
        llm = stack.enter_context(engine(job.model, job.policy, job.options, **settings))
        probe = Probe(llm)
        watch = _Watch(probe.scheduler, patch)
        oracle = ConversationOracle(probe.scheduler)
        if job.follow:
            oracle.install(patch)
        if job.record:
            llm.collective_rpc("start_recording", args=(1,))
        outputs = _ask(llm, job)
        (frames,) = llm.collective_rpc("take_recording") if job.record else ([],)
        core = llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        return Outcome(
            runner=type(runner).__mro__[1].__module__,
            tokens=[list(output.outputs[0].token_ids) if output else [] for output in outputs],
            cached=[output.num_cached_tokens or 0 if output else 0 for output in outputs],
            held=dict(map(_positions, frames)),
            in_flight=watch.most,
            preemptions=probe.num_preemptions,
            compared=oracle.num_compared,
            victims=oracle.num_victims,
            ties=oracle.num_ties,
            max_error=oracle.max_error,
            accepted=oracle.num_accepted,
            rejected=oracle.num_rejected,
            replays=graphs.Graph.num_replays - replays,
            packed_after_graphs=watch.packed_after_graphs,
            known=watch.known,
            pages=[probe.num_free, probe.num_total],
        )


def on_v1(job: Job, **changes: Any) -> Outcome:
    """The same of the model runner that vLLM takes here: torch's kernels, one step at a time."""
    settings = {name: job.settings[name] for name in job.settings if name not in GRAPHS}
    options = {**(job.options or {}), "kernels": "torch"}
    plain = {"settings": settings, "options": options, "triton": False, "follow": False}
    outcome = run(replace(job, **{**plain, **changes}))
    assert outcome.runner == V1
    assert (outcome.in_flight, outcome.replays) == (1, 0)
    return outcome


class _Watch:
    """Counts steps between their schedule and their tokens, and packings in steps with a graph.

    And reads the tokens that the worker has handed out of a step when its survivors are packed.
    """

    def __init__(self, scheduler: Any, patch: pytest.MonkeyPatch) -> None:
        self.now = self.most = self.replays = self.packed_after_graphs = 0
        self.known: dict[str, int] = {}
        self.sampled: Any = None
        sample, finish = KeepsSeeds.sample_tokens, PublishesSteps.finish_step
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def counted_schedule(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.now += output.total_num_scheduled_tokens > 0
            self.most = max(self.most, self.now)
            return output

        def counted_update(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self.now -= scheduled.total_num_scheduled_tokens > 0
            return update(scheduled, *args, **kwargs)

        def kept_sample(worker: Any, grammar_output: Any) -> Any:
            self.sampled = sample(worker, grammar_output)
            return self.sampled

        def read_finish(worker: Any) -> Any:
            step, sampled, self.sampled = worker._unfinished, self.sampled, None
            before, self.replays = self.replays, graphs.Graph.num_replays
            packs = step is not None and step.after.pack is not None
            self.packed_after_graphs += packs and self.replays > before
            if packs and sampled is not None:
                self._read(step.plan.requests, sampled)
            return finish(worker)

        scheduler.schedule, scheduler.update_from_output = counted_schedule, counted_update
        patch.setattr(KeepsSeeds, "sample_tokens", kept_sample)
        patch.setattr(PublishesSteps, "finish_step", read_finish)

    def _read(self, plans: Mapping[str, RequestPlan], sampled: Any) -> None:
        """The tokens of prompts that end in a step and are evicted from, on the host."""
        order = vars(sampled).get("model_runner_output", sampled).req_ids
        for row, request_id in enumerate(order):
            plan = plans[request_id]
            if plan.num_survivors and plan.logical_end == plan.prompt_end:
                index = request_id.split("-")[0]
                self.known[index] = int(sampled.sampled_token_ids[row][0])


def _ask(llm: LLM, job: Job) -> list[RequestOutput | None]:
    """Requests arrive, and some are aborted, in the steps that the job names."""
    params = SamplingParams(
        temperature=0, max_tokens=job.max_tokens, ignore_eos=True, detokenize=False
    )
    arrivals = job.arrivals or [0] * len(job.prompts)
    waiting = sorted(range(len(job.prompts)), key=lambda i: arrivals[i])
    latest: dict[int, RequestOutput] = {}
    step = 0
    while waiting or llm.llm_engine.has_unfinished_requests():
        if waiting and not llm.llm_engine.has_unfinished_requests():
            step = max(step, arrivals[waiting[0]])
        while waiting and arrivals[waiting[0]] <= step:
            index = waiting.pop(0)
            prompt: Any = {"prompt_token_ids": job.prompts[index]}
            llm.llm_engine.add_request(str(index), prompt, params)
        for output in llm.llm_engine.step():
            latest[int(output.request_id)] = output
        step += 1
        gone = [index for index, when in job.aborts.items() if when == step]
        llm.llm_engine.abort_request(gone)
    return [latest.get(index) for index in range(len(job.prompts))]


def _triton(vllm_config: Any, spec: Any, device: Any, config: Any) -> TritonKernels:
    heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
    rows = vllm_config.scheduler_config.max_num_seqs
    return TritonKernels(device, rows, heads, spec.num_kv_heads, spec.head_size)


@contextmanager
def _forgetful() -> Iterator[None]:
    """Batches are in memory of their own."""
    make = batching.PersistentBatch.__call__

    def call(batch: batching.PersistentBatch, rows: batching.Rows) -> Any:
        batch._fields = batch._fields.clone()
        return make(batch, rows)

    with mock.patch.object(batching.PersistentBatch, "__call__", call):
        yield


def _positions(frame: dict[str, Any]) -> tuple[str, list[list[int]]]:
    index = frame["request_id"].split("-")[0]
    strips = len(frame["layers"]) * frame["num_kv_heads"]
    positions = np.frombuffer(frame["positions"], np.int32).reshape(strips, -1)
    return f"{index} {frame['logical_len']}", np.sort(positions).tolist()
