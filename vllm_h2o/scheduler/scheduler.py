# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler, which also plans how many tokens of each request stay resident."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from types import MethodType
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from vllm_h2o.errors import ConfigError, IntegrityError
from vllm_h2o.options.checks import check_positions
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.request import asked_budget, budget_of, extra_args_of
from vllm_h2o.options.traits import bounds_hits
from vllm_h2o.pages import num_pages
from vllm_h2o.plugin import activate_engine
from vllm_h2o.policy import Budget
from vllm_h2o.scheduler.block_manager import HeavyHitterManager
from vllm_h2o.scheduler.chunks import CutsChunks
from vllm_h2o.scheduler.footprint import Pool
from vllm_h2o.scheduler.ledger import Ledger
from vllm_h2o.scheduler.other_groups import OtherGroups, policy_group
from vllm_h2o.scheduler.pressure import SPARE, Forecast, most_taken, pages_to_admit, relieve
from vllm_h2o.scheduler.raw_prompts import LoadsPrompts
from vllm_h2o.scheduler.resumption import fewest_pages
from vllm_h2o.scheduler.rules import Rules
from vllm_h2o.scheduler.spec import HeavyHitterSpec
from vllm_h2o.scheduler.start import Start
from vllm_h2o.scheduler.stats import StatsReporter
from vllm_h2o.scheduler.turns import KeepsTurns
from vllm_h2o.scheduler.waits import WaitsForChecks

logger = init_logger("vllm.kv_policy")


class HeavyHitterScheduler(CutsChunks, KeepsTurns, LoadsPrompts, WaitsForChecks):
    """Puts a :class:`~vllm_h2o.wire.ResidencyPlan` on every SchedulerOutput."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = KVPolicyConfig.required(self.vllm_config)
        self.policy_config = config
        self.block_manager, self.other_groups = self._managers(self.kv_cache_config)
        block_size = self.block_manager.block_size
        self._drafted: list[str] = []
        rules = self._rules(config, block_size)
        self.ledger = Ledger(config.resolve(self.max_model_len, block_size), block_size, rules)
        # A liberty: the switch of a hook for Mamba, at which a chunk of a prompt may end early.
        self.need_mamba_block_aligned_split = (
            rules.prefix_caching
            or rules.observation_window > 0
            or rules.chunk > 0
            or rules.num_drafts > 0
            or (rules.splits and rules.continues)
        )
        if config.continues or self.connector is not None:
            activate_engine()
        self.conversations = self.keep_turns() if config.continues else None
        largest_chunk = self.vllm_config.scheduler_config.max_num_batched_tokens
        # vLLM stops in time with three steps in flight; each further one may compute a token more.
        max_overshoot = max(self.vllm_config.max_concurrent_batches - 3, 0)
        self.block_manager.bind(
            self.ledger,
            self.requests,
            self._budget_of,
            largest_chunk,
            max_overshoot,
            self.other_groups,
            self.conversations,
        )
        self.weights = None if self.conversations is None else self.conversations.weights
        if self.connector is not None:
            self.weights = self.load_prompts(self.block_manager)
        # A block id names one page in each layer of a group; some groups have fewer layers.
        groups = self.kv_cache_config.kv_cache_groups
        num_layers = max(len(group.layer_names) for group in groups)
        self.stats_reporter = StatsReporter(
            self.block_manager,
            num_layers,
            self.other_groups,
            self.conversations,
        )
        self._log_start(config)
        if not self.scheduler_config.async_scheduling:
            # vLLM uses its synchronous scheduler then. The asynchronous one counts tokens before
            # they are sampled, which is wrong for a pipeline with several batches in flight.
            for name in ("_update_after_schedule", "_update_request_with_output"):
                setattr(self, name, MethodType(getattr(Scheduler, name), self))

    def _rules(self, config: KVPolicyConfig, block_size: int) -> Rules:
        """The options and vLLM's limits, as far as the ledger needs them."""
        scores_together = config.ranking.term("rotated", "reread") is not None
        reread = config.ranking.term("reread")
        reread_block = reread.block_slots(block_size) if reread else 0
        return Rules(
            at=config.schedule.at,
            observation_window=config.num_window_queries,
            lifetime=config.ranking.lifetime,
            chunk=self._scored_chunk(reread_block) if scores_together else 0,
            reread_block=reread_block,
            max_step_tokens=self.max_num_scheduled_tokens,
            max_blocks_per_request=num_pages(self.max_model_len, block_size),
            prefix_caching=self._prefix_caching,
            splits=config.splits,
            num_drafts=self.num_spec_tokens,
            position_limit=config.position_limit,
            continues=config.continues,
        )

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One step of vLLM's schedule, with its plan as ``residency_plan``."""
        if self.ledger.rules.under_pressure:
            self._relieve_pressure()
        # Data parallelism puts prompts off, but a turn that takes a token a step holds nobody up.
        throttle_prefills = throttle_prefills and not any(
            request.is_prefill_chunk and self.ledger.states[request.request_id].is_split
            for request in self.running
        )
        output = super().schedule(throttle_prefills)
        plan = self.ledger.take_step(output.num_scheduled_tokens)
        # A liberty: an attribute added to vLLM's object, which reaches every worker.
        output.residency_plan = replace(plan, **self.take_copies())
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Process the sampled tokens, and take rejected drafts off what requests hold."""
        self._drafted = list(scheduler_output.scheduled_spec_decode_tokens)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._settle()
        return outputs

    def _settle(self) -> None:
        """Take rejected drafts off what requests hold: once, and before lengths are counted."""
        drafted, self._drafted = self._drafted, []
        for request_id in drafted:
            if request_id in self.ledger.states:
                computed = self.requests[request_id].num_computed_tokens
                self.ledger.settle(request_id, computed)

    def _relieve_pressure(self) -> None:
        """Choose requests that fall back to their budget, before vLLM preempts any."""
        # As vLLM does first: pages behind the survivors of the last step are free now.
        self.kv_cache_manager.new_step_starts()
        states, block_size = self.ledger.states, self.block_manager.block_size
        pool, waiting = self.block_manager.block_pool, list(self._pages_waited_for())
        others = self.other_groups.num_taken(states)
        free, most = pool.get_num_free_blocks() - others, most_taken(states.values(), block_size)
        if most + sum(waiting) <= free:
            self.ledger.is_short = False
            self.block_manager.reserve(most + others)
            return
        ranked = self.policy == SchedulingPolicy.PRIORITY
        forecasts = [
            Forecast.of(
                request.request_id,
                states[request.request_id],
                block_size,
                request.request_id in self.ledger.falling_back,
                request.priority if ranked else 0,
                self.ledger.resumed.get(request.request_id, 0),
            )
            for request in self.running
            if request.request_id in states
        ]
        spare = math.ceil(SPARE * (pool.num_gpu_blocks - 1))
        relief = relieve(free, forecasts, waiting, spare)
        self.ledger.falling_back.update(relief.falling_back)
        self.ledger.is_short = relief.is_short
        self.block_manager.reserve(sum(forecast.takes for forecast in forecasts) + others)

    def _pages_waited_for(self) -> Iterator[int]:
        """Pages of each waiting request that only pages keep out of this step or the next."""
        if self._pause_state != PauseState.UNPAUSED:
            return
        room = self.max_num_active_reqs - len(self.running) - self.num_waiting_for_streaming_input
        num_tokens, adapters = 0, self._adapters_at_work()
        # vLLM keeps these free when it admits a request beside others.
        kept_free = self.kv_cache_manager.watermark_blocks if self.running else 0
        ready = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        every = chain(self.kv_holding_waiting, self.waiting)
        asking = (r for r in every if r.status in ready and r.request_id not in self.checking)
        for request in islice(asking, max(room, 0)):
            if num_tokens >= self.max_num_scheduled_tokens:
                return
            adapter = request.lora_request and request.lora_request.lora_int_id
            if adapters is not None and adapter and adapter not in adapters:
                continue
            num_tokens += request.num_tokens
            info = self.block_manager.info_of(request)
            needed = pages_to_admit(info, self.block_manager.block_size)
            if request.num_tokens > request.num_prompt_tokens:
                needed = fewest_pages(self.ledger, info) or needed
            yield needed + self.other_groups.num_to_admit(info) + kept_free
            kept_free = 0

    def _adapters_at_work(self) -> set[int] | None:
        """LoRA adapters of running requests, if vLLM admits no other adapter; else None."""
        if self.lora_config is None:
            return None
        running = {r.lora_request.lora_int_id for r in self.running if r.lora_request}
        return running if len(running) >= self.lora_config.max_loras else None

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """vLLM's statistics with the policy's; None if they are switched off.

        A liberty: they travel in ``running_lora_adapters``, a mapping of integers that the
        scheduler leaves empty and that is read only with LoRA. ``kv_connector_stats``, which takes
        any payload, would stop a front end without a connector.
        """
        self._settle()
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            self.stats_reporter.report().put_into(stats.running_lora_adapters)
        return stats

    def check_integrity(self) -> None:
        """Check blocks and lengths, and compare lengths with vLLM's.

        Raises:
            IntegrityError: with the numbers.

        """
        self.block_manager.check_integrity()
        for request_id, state in self.ledger.states.items():
            request = self.requests[request_id]
            computed = request.num_computed_tokens
            # vLLM rolls a stopped session back to its last sampled token; whether the session goes
            # on from what it holds is decided when its next part arrives.
            if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                continue
            if computed != state.logical_len:
                raise IntegrityError(
                    f"request {request_id}: vLLM counts {computed} computed tokens, "
                    f"the ledger {state.logical_len}"
                )

    @property
    def _prefix_caching(self) -> bool:
        return bool(self.cache_config.enable_prefix_caching)

    def _get_local_prefix_cache_hit(
        self, request: Request, *limits: Any
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        """The cached prefix of a request, without tokens that it has to compute itself.

        ``limits`` are vLLM's own; 0.33 has one, 0.32 none. Sliding windows are cached only where a
        hit ends, so beside them a shorter hit has to be looked up again with its limit.
        """
        find, manager = super()._get_local_prefix_cache_hit, self.block_manager
        if self.conversations is not None:
            self.conversations.weights.begin(request)
        blocks, num_cached, *rest = find(request, *limits)
        if self._prefix_caching and (num_cached or self.other_groups.managers):
            own = self.ledger.max_cached_tokens(manager.info_of(request))
            num_written = manager.num_written(blocks.blocks[manager.kv_cache_group_id])
            limit = min(own, num_written * manager.block_size)
            if self.other_groups.managers:
                if num_cached > limit:
                    blocks, num_cached, *rest = find(request, limit)
                # vLLM caches windows at this length, for a later request with this prefix.
                rest[0] = min(rest[0] or own, own)
            elif num_cached > limit:
                blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, limit)
                num_cached = limit
        num_begun, continues = manager.continue_from(request, num_cached)
        if continues:
            blocks = self.kv_cache_manager.empty_kv_cache_blocks
        if self.resumes_in_chunks(request, blocks, num_begun) and not continues:
            return self.kv_cache_manager.empty_kv_cache_blocks, 0, *rest
        return blocks, num_begun, *rest

    def _scored_chunk(self, reread_block: int) -> int:
        """Tokens that a step has room for beside one of each other sequence; at least half.

        Where they are read again in the same step, half as many, in whole blocks.
        """
        limits, max_tokens = self.scheduler_config, self.max_num_scheduled_tokens
        others = (limits.max_num_seqs - 1) * (1 + self.num_spec_tokens)
        room = max(max_tokens - others, max_tokens // 2, 1)
        if reread_block:
            room = max(room // 2, 1)
            if room > reread_block:
                room -= room % reread_block
        return min(room, limits.long_prefill_token_threshold or room)

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        """Take a streaming input's next part: after its resident tokens, or all from the start."""
        super()._update_request_as_session(session, update)
        # A chunk of a prompt attends to a merged token as to a single one.
        if self.policy_config.merges or not self.block_manager.extend(session):
            self._free_request_blocks(session)
            session.num_computed_tokens = 0

    def _budget_of(self, request: Request) -> Budget | None:
        """A request's own budget. It depends on the original prompt, also when it is resumed."""
        engine = (self.max_model_len, self.block_manager.block_size)
        lengths = (*engine, request.num_prompt_tokens, request.max_tokens)
        try:
            asked = asked_budget(extra_args_of(request))
            budget = budget_of(self.policy_config, *lengths, asked)
            if budget is not None:
                chunk = self.scheduler_config.max_num_batched_tokens
                longest = request.num_prompt_tokens + request.max_tokens
                check_positions(self.policy_config, "a budget", budget, chunk, longest)
            return budget
        except ConfigError as error:
            # It was checked on arrival, but the prompt of a session grows afterwards.
            logger.warning_once("%s It gets the engine's budget.", error)
            return budget_of(self.policy_config, *lengths, None)

    def _managers(self, kv_cache_config: KVCacheConfig) -> tuple[HeavyHitterManager, OtherGroups]:
        """The policy's block manager, and vLLM's managers of other groups.

        Pages that a window takes are cleared first: they may hold scores, which are no K or V.
        Beside states vLLM clears pages anyway.
        """
        config = self.policy_config
        alone = (
            (self._prefix_caching and not bounds_hits(self.vllm_config))
            or config.continues
            or config.rolls
            or config.splits_layers
            or config.ranking.term("reread") is not None
            or self.num_spec_tokens > 0
        )
        own = policy_group(kv_cache_config, alone)
        managers = list(self.kv_cache_manager.coordinator.single_type_managers)
        manager = managers.pop(own)
        assert isinstance(manager, HeavyHitterManager)
        for other in managers:
            # A liberty: vLLM does this if caches differ in their dtype.
            self.needs_kv_cache_zeroing = other._record_new_block_ids = True
            # A liberty: they publish the same prefix as the policy's group.
            other.cache_blocks = partial(manager.publish, other, other.cache_blocks)
        return manager, OtherGroups(managers)

    def _log_start(self, config: KVPolicyConfig) -> None:
        manager, limits = self.block_manager, self.scheduler_config
        spec, groups = manager.kv_cache_spec, self.kv_cache_config.kv_cache_groups
        assert isinstance(spec, HeavyHitterSpec)
        pool = Pool(self.kv_cache_config.num_blocks, manager.block_size)
        num_bytes = pool.num_blocks * spec.unpadded_page_size_bytes
        own = len(groups[manager.kv_cache_group_id].layer_names)
        start = Start(
            config=config,
            budget=self.ledger.budget,
            pool=pool,
            stock_pool=Pool(num_bytes // spec.stock_page_size_bytes, pool.block_size),
            max_model_len=self.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            num_layers=(own, sum(len(group.layer_names) for group in groups) - own),
            num_other_pages=(
                pool.pages_of_windows(
                    self.other_groups.windows,
                    self.max_model_len,
                    self.vllm_config.max_concurrent_batches,
                ),
                self.other_groups.num_states,
            ),
            drops=config.merge_reason(self.vllm_config),
            num_host_pages=self.conversations.host.num_pages if self.conversations else 0,
        )
        for line in start.lines():
            logger.info("%s: %s", config.name, line)
