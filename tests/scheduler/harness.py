# SPDX-License-Identifier: Apache-2.0
"""The real scheduler, KV-cache manager and block pool, with a pool whose contents are simulated."""

from __future__ import annotations

import random
import tempfile
from collections import Counter, deque
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from math import lcm
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.scheduler.shadow import ShadowPool
from tests.tiny_models import engine_config, folder
from vllm_h2o.scheduler.resumption import fewest_pages
from vllm_h2o.scheduler.scheduler import HeavyHitterScheduler
from vllm_h2o.scheduler.spec import HeavyHitterSpec
from vllm_h2o.wire import Plans, RequestPlan

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
STOP = 9
"""A token at which a request ends early: with another step in flight, if async."""
LIFETIME = 9
"""Tokens for which a window term counts here; h2o2's 128 are more than a sequence has."""

_MODELS = tempfile.TemporaryDirectory(prefix="vllm-h2o-test-")  # gone when the tests end


@lru_cache
def vllm_config(
    budget: float,
    max_batched: int,
    max_seqs: int,
    policy: str,
    async_scheduling: bool,
    options: tuple[tuple[str, object], ...] = (),
) -> VllmConfig:
    """A real config of a tiny model with the policy on.

    ``options`` are the policy's, ``prefix_caching``, and ``drafts``: how many at most.
    """
    own = {"name": "h2o", "budget": budget, **dict(options)}
    drafts = own.pop("drafts", 0)
    ngram = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
    config = engine_config(
        folder(Path(_MODELS.name), "LlamaForCausalLM"),
        block_size=1 if "positions" in own else 8,  # of a CPU's own pages the budget is none
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=max_batched,
        max_num_seqs=max_seqs,
        scheduling_policy=policy,
        enable_prefix_caching=bool(own.pop("prefix_caching", False)),
        additional_config={"kv_policy": own},
        speculative_config=ngram if drafts else None,
    )
    config.scheduler_config.async_scheduling = async_scheduling  # the CPU platform forces it off
    return config


def make_scheduler(
    config: VllmConfig,
    num_blocks: int,
    block_size: int,
    log_stats: bool = False,
    windows: Sequence[int] = (),
) -> HeavyHitterScheduler:
    """The plugin's scheduler over a pool of ``num_blocks`` pages, one of them the null page.

    ``windows`` are those of layers that slide, whose groups come before the policy's; 0: a group
    of states.
    """
    shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.block_size = block_size
    own = HeavyHitterSpec.of(FullAttentionSpec(**shape))
    padded = {**shape, "page_size_padded": own.page_size_bytes}
    state = MambaSpec(
        block_size=MAX_MODEL_LEN,
        shapes=((block_size, 8),),
        dtypes=(torch.float32,),
        page_size_padded=own.page_size_bytes,
    )
    specs: list[KVCacheSpec] = [
        SlidingWindowSpec(**padded, sliding_window=size) if size else state for size in windows
    ]
    specs.append(own)
    groups = [KVCacheGroupSpec([f"layer {index}"], spec) for index, spec in enumerate(specs)]
    return HeavyHitterScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=lcm(*(spec.block_size for spec in specs)),
        log_stats=log_stats,
    )


class Simulation:
    """A scheduler, the shadow pool, and up to ``depth`` steps whose output is still on its way."""

    def __init__(
        self,
        config: VllmConfig,
        num_blocks: int,
        depth: int,
        seed: int = 0,
        block_size: int = BLOCK_SIZE,
        windows: Sequence[int] = (),
    ) -> None:
        self.scheduler = make_scheduler(config, num_blocks, block_size, windows=windows)
        ledger = self.scheduler.ledger
        ledger.rules = replace(ledger.rules, lifetime=min(ledger.rules.lifetime, LIFETIME))
        self._preempt, self.scheduler._preempt_request = (
            self.scheduler._preempt_request,
            self._preempt_checked,
        )
        self.pool = ShadowPool(seed, block_size, windows)
        self.hasher = None
        if config.cache_config.enable_prefix_caching:
            init_none_hash(sha256)
            self.hasher = get_request_block_hasher(block_size, sha256)
        self.told = Plans()
        self.random = random.Random(seed)
        self.stop_rate = 0.0
        self.depth = depth
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.count: Counter[str] = Counter()
        self.peak_held = 0

    @property
    def num_free(self) -> int:
        """Free pages, read from the block pool."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def num_total(self) -> int:
        """Pages of the pool without the null page."""
        return self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1

    def pages_of(self, request_id: str) -> int:
        """Pages that a request holds, read from vLLM's manager."""
        return len(self.scheduler.kv_cache_manager.get_block_ids(request_id)[-1])

    def add(
        self,
        prompt_len: int,
        max_tokens: int,
        priority: int = 0,
        resumable: bool = False,
        request_id: str | None = None,
        fork: int | None = None,
        budget: float | str | None = None,
    ) -> str:
        """A new request, or the next part of a streaming input.

        Its prompt is that of every other request up to token ``fork``; the whole, if that is None.
        """
        request_id = request_id or f"r{self.count['add']}"
        own = 1000 * self.count["add"]
        # Generated tokens are below 10.
        prompt = [10 + i + (0 if fork is None or i < fork else own) for i in range(prompt_len)]
        # Parts of a session are one prompt; what it generated in between is in no prompt here.
        self.pool.prompts[request_id] = (*self.pool.prompts.get(request_id, ()), *prompt)
        self.count["add"] += 1
        own_budget = {} if budget is None else {"kv_budget": budget}
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            stop_token_ids=[STOP],
            extra_args=own_budget,
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            priority=priority,
            resumable=resumable,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests in whatever state they are."""
        self.count["abort"] += len(request_ids)
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        self.scheduler.check_integrity()

    def step(self) -> SchedulerOutput:
        """Schedule one step, run it, and deliver the outputs that are due."""
        scheduler = self.scheduler
        before = {r.request_id for r in scheduler.running}
        output = scheduler.schedule()
        scheduler.check_integrity()
        self.count["ongoing"] += len(tuple(output.residency_plan.ongoing))
        whole = self.told.complete(output.residency_plan, output.finished_req_ids)
        # Plans of ongoing requests change in the next step, and outputs are read after it.
        copies = {request_id: copy(plan) for request_id, plan in whole.requests.items()}
        output.residency_plan = replace(whole, requests=copies)
        self.count["preempt"] += len(before - {r.request_id for r in scheduler.running})
        self.count["resume"] += len(output.scheduled_cached_reqs.resumed_req_ids)
        plans = output.residency_plan.requests.values()
        for request_id, plan in copies.items():
            self._check(request_id, plan)
        self.count["chunk"] += sum(p.in_prompt and p.logical_start > 0 for p in plans)
        self.count["decode"] += sum(not p.in_prompt for p in plans)
        self.count["pack"] += sum(p.num_survivors > 0 for p in plans)
        self.count["fall back"] += sum(p.falls_back for p in plans)
        self.count["together"] += sum(p.evicts_together for p in plans)
        self.count["move"] += sum(p.pack_block_idx > 0 for p in plans)
        lives = zip(output.residency_plan.requests, plans, strict=True)
        self.count["hit"] += sum(p.logical_start > 0 for i, p in lives if i not in self.pool.tables)
        self.count["page"] += sum(p.budget.unit > 1 and p.num_survivors > 0 for p in plans)
        self.count["restore"] += sum(p.restored_end > 0 for p in plans)
        resumed = self.scheduler.ledger.resumed
        self.count["pack resumed"] += sum(
            p.num_survivors > 0 and p.logical_end < p.prompt_end
            for request_id, p in copies.items()
            if request_id in resumed
        )
        self.count["pack within a prompt"] += self._num_packed_within_a_prompt(output)
        self.peak_held = max(self.peak_held, self.num_total - self.num_free)
        self.pool.execute(output)
        self.in_flight.append((output, self._sample(output)))
        while len(self.in_flight) >= self.depth or (
            self.in_flight and not output.total_num_scheduled_tokens
        ):
            self.deliver()
        return output

    def _preempt_checked(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Past its prompt a request needs no more than the pages that it gives back and a chunk."""
        scheduler, size = self.scheduler, self.pool.block_size
        ledger, manager = scheduler.ledger, scheduler.block_manager
        state, row = ledger.states.get(request.request_id), manager.req_to_blocks
        given = [b for b in row.get(request.request_id, ()) if not b.is_null]
        self._preempt(request, *args, **kwargs)
        if state is None or state.in_prompt:
            return
        info, chunk = manager.info_of(request), max(size, ledger.rules.observation_window)
        needed = fewest_pages(ledger, info) or ledger.num_pages(request.num_tokens)
        assert needed <= len(given) + ledger.num_pages(chunk), (request.request_id, state)

    def deliver(self) -> None:
        """Hand the oldest step's sampled tokens to the scheduler."""
        before = set(self.scheduler.requests)
        output, sampled = self.in_flight.popleft()
        self.scheduler.update_from_output(output, sampled)
        self.count["finish"] += len(before - set(self.scheduler.requests))
        self.scheduler.check_integrity()
        if num_drafts := self.scheduler.ledger.rules.num_drafts:
            some = [self.random.randint(0, num_drafts) for _ in sampled.req_ids]
            drafts = DraftTokenIds(sampled.req_ids, [[8] * num for num in some])
            self.scheduler.update_draft_token_ids(drafts)

    def _sample(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One token for each request whose last known token was computed."""
        ids = list(output.num_scheduled_tokens)
        done = [not self.scheduler.requests[i].is_prefill_chunk for i in ids]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[
                self._accepted(output, i) + [self._token()] if samples else []
                for i, samples in zip(ids, done, strict=True)
            ],
        )

    def _accepted(self, output: SchedulerOutput, request_id: str) -> list[int]:
        """Accept a random number of a request's drafts."""
        drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
        num = self.random.randint(0, len(drafts))
        self.count["accepted"] += num
        self.count["rejected"] += len(drafts) - num
        self.pool.accept(request_id, output.residency_plan.requests[request_id], num)
        return drafts[:num]

    def _num_packed_within_a_prompt(self, output: SchedulerOutput) -> int:
        plans = output.residency_plan.requests.values()
        return sum(p.num_survivors > 0 and p.logical_end < p.prompt_end for p in plans)

    def _token(self) -> int:
        return STOP if self.random.random() < self.stop_rate else 7

    def reset(self) -> None:
        """Reset as vLLM does after new weights: every running request begins again."""
        self.count["reset"] += 1
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.scheduler.check_integrity()

    def _check(self, request_id: str, plan: RequestPlan) -> None:
        """Compare a plan with the rules, whatever else its step computes."""
        rules, end = self.scheduler.ledger.rules, plan.prompt_end
        assert end == self.scheduler.ledger.states[request_id].prompt_end
        if plan.in_prompt and plan.logical_end < end:
            # No chunk ends within the observation window.
            window_start = end - rules.observation_window
            assert plan.logical_end <= window_start
            resumed = self.scheduler.ledger.resumed.get(request_id, MAX_MODEL_LEN)
            size = max(min(rules.chunk, resumed), rules.observation_window)
            assert plan.num_new <= max(resumed, size)
            assert not rules.chunk or plan.num_new in (size, window_start - plan.logical_start)
        if plan.num_survivors:
            assert plan.num_survivors == plan.budget.survivors(plan.attended_len)
            assert plan.num_new == 1 or plan.in_prompt
        if not plan.in_prompt and not plan.fits and rules.lifetime:
            over = end + rules.lifetime
            crosses = plan.logical_start < over <= plan.logical_end
            scored = end - self.scheduler.ledger.states[request_id].prompt_start > 1
            assert plan.restored_end == (end if crosses and scored else 0)
            assert plan.num_new == 1 or not plan.restored_end

    def run(self, ops: Sequence[tuple]) -> None:
        """Do what a random schedule says, then all that is left.

        Args:
            ops: ("add", prompt length, most tokens, requests, fork, own budget) |
                ("steps", how many) | ("abort", whom) | ("reset",).

        """
        for op in ops:
            if op[0] == "add":
                prompt_len = op[1]
                for priority in range(op[3]):
                    most = min(op[2], MAX_MODEL_LEN - prompt_len)
                    self.add(prompt_len, most, -priority, fork=op[4], budget=op[5])
            else:
                self.run_one(op)
        self.drain()

    def run_one(self, op: tuple) -> None:
        """Steps, a reset, or an abort."""
        if op[0] == "steps":
            for _ in range(op[1]):
                self.step()
        elif op[0] == "reset":
            self.reset()
        elif live := sorted(self.scheduler.requests):
            self.abort([live[op[1] % len(live)]])

    def drain(self, limit: int = 2000) -> None:
        """Run until nothing is left."""
        for _ in range(limit):
            if not self.scheduler.has_unfinished_requests() and not self.in_flight:
                return
            self.step()
        raise AssertionError("the schedule does not come to an end")
