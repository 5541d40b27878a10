"""vLLM's scheduler, which also says how many tokens of each request stay resident."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from types import MethodType
from typing import Any

from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name
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
from vllm_h2o.options.request import asked_budget, budget_of
from vllm_h2o.options.traits import bounds_hits
from vllm_h2o.pages import num_pages
from vllm_h2o.policy import Budget, ScoreKind
from vllm_h2o.scheduler.chunks import CutsChunks
from vllm_h2o.scheduler.conversations import Conversations
from vllm_h2o.scheduler.footprint import Pool, row_bytes
from vllm_h2o.scheduler.ledger import Ledger
from vllm_h2o.scheduler.manager import HeavyHitterManager
from vllm_h2o.scheduler.pressure import Forecast, most_taken, pages_to_admit, relieve
from vllm_h2o.scheduler.spec import HeavyHitterSpec
from vllm_h2o.scheduler.stats import StatsReporter
from vllm_h2o.scheduler.windows import Windows, policy_group

logger = init_logger("vllm.kv_policy")


class HeavyHitterScheduler(CutsChunks):
    """Puts a :class:`~vllm_h2o.wire.ResidencyPlan` on every SchedulerOutput."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = KVPolicyConfig.required(self.vllm_config)
        self.policy_config = config
        self.manager, self.windows = self._managers(self.kv_cache_config)
        block_size = self.manager.block_size
        self._drafted: list[str] = []
        self.ledger = Ledger(
            config.resolve(self.max_model_len, block_size),
            block_size,
            config.seed,
            packs_chunks=config.prefill == "chunked",
            observation_window=config.num_window_queries,
            scores_window_only=config.prefill == "window",
            window_lifetime=config.window_lifetime if config.keeps_scores else 0,
            second_pass_chunk=self._second_pass_chunk() if config.ranking.second_pass else 0,
            evicts_blocks=config.granularity == "block",
            max_blocks_per_request=num_pages(self.max_model_len, block_size),
            prefix_caching=self._prefix_caching,
            splits=config.splits,
            under_pressure=config.eviction == "pressure",
            num_drafts=self.num_spec_tokens,
            position_limit=config.position_limit,
            continues=config.continuation,
        )
        # A liberty: the switch of a seam for Mamba, at which a chunk of a prompt may end early.
        self.need_mamba_block_aligned_split = (
            self._prefix_caching
            or config.ranking.second_pass is not None
            or self.num_spec_tokens > 0
        )
        largest_chunk = self.vllm_config.scheduler_config.max_num_batched_tokens
        # vLLM stops in time with three steps in flight; each more may compute a token too many.
        max_overshoot = max(self.vllm_config.max_concurrent_batches - 3, 0)
        self.manager.bind(
            self.ledger,
            self.requests,
            self._budget_of,
            largest_chunk,
            max_overshoot,
            self.windows,
            self._conversations() if config.continuation else None,
        )
        # A block id names one page in each layer of a group; groups may be filled up with none.
        groups = self.kv_cache_config.kv_cache_groups
        num_layers = max(len(group.layer_names) for group in groups)
        self.stats_reporter = StatsReporter(self.manager, num_layers, self.windows)
        self._log_meaning(config)
        if not self.scheduler_config.async_scheduling:
            # vLLM takes its other scheduler then. The asynchronous one runs ahead of the tokens:
            # wrong where several batches are in flight all the same, in a pipeline.
            for name in ("_update_after_schedule", "_update_request_with_output"):
                setattr(self, name, MethodType(getattr(Scheduler, name), self))

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One step of vLLM's schedule, with its plan as ``residency_plan``."""
        if self.ledger.under_pressure:
            self._relieve_pressure()
        output = super().schedule(throttle_prefills)
        plan = self.ledger.take_step(output.num_scheduled_tokens)
        # A liberty: an attribute added to an object of vLLM's, which reaches every worker.
        output.residency_plan = replace(plan, continued=self.manager.take_continued())
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Hand over the sampled tokens; the drafts that were rejected are computed no more."""
        self._drafted = list(scheduler_output.scheduled_spec_decode_tokens)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._settle()
        return outputs

    def _settle(self) -> None:
        """Take rejected drafts off what requests hold: once, and before anybody counts."""
        drafted, self._drafted = self._drafted, []
        for request_id in drafted:
            if request_id in self.ledger.states:
                computed = self.requests[request_id].num_computed_tokens
                self.ledger.settle(request_id, computed)

    def _relieve_pressure(self) -> None:
        """Say which requests fall back to their budget in their next step, before vLLM preempts."""
        # vLLM does this first, too: pages of the last step's packings are free now.
        self.kv_cache_manager.new_step_starts()
        states, block_size = self.ledger.states, self.manager.block_size
        pool, waiting = self.manager.block_pool, list(self._pages_waited_for())
        others = self.windows.num_taken(states)
        free, most = pool.get_num_free_blocks() - others, most_taken(states.values(), block_size)
        if most + sum(waiting) <= free:
            self.ledger.is_short = False
            self.manager.reserve(most + others)
            return
        ranked = self.policy == SchedulingPolicy.PRIORITY
        forecasts = [
            Forecast.of(
                request.request_id,
                states[request.request_id],
                block_size,
                request.request_id in self.ledger.falling_back,
                request.priority if ranked else 0,
            )
            for request in self.running
            if request.request_id in states
        ]
        spare = math.ceil(self.policy_config.pressure_watermark * (pool.num_gpu_blocks - 1))
        relief = relieve(free, forecasts, waiting, spare)
        self.ledger.falling_back.update(relief.falling_back)
        self.ledger.is_short = relief.is_short
        self.manager.reserve(sum(forecast.takes for forecast in forecasts) + others)

    def _pages_waited_for(self) -> Iterator[int]:
        """Pages of each waiting request that this step or the next has room for but for them."""
        if self._pause_state != PauseState.UNPAUSED:
            return
        room = self.max_num_active_reqs - len(self.running) - self.num_waiting_for_streaming_input
        num_tokens = 0
        # vLLM keeps these free when it admits a request next to others.
        kept_free = self.kv_cache_manager.watermark_blocks if self.running else 0
        adapters = self._adapters_at_work()
        ready = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        every = chain(self.kv_holding_waiting, self.waiting)
        for request in islice((r for r in every if r.status in ready), max(room, 0)):
            if num_tokens >= self.max_num_scheduled_tokens:
                return
            adapter = request.lora_request and request.lora_request.lora_int_id
            if adapters is not None and adapter and adapter not in adapters:
                continue
            num_tokens += request.num_tokens
            info = self.manager.info_of(request)
            needed = pages_to_admit(info, self.manager.block_size) + self.windows.num_to_admit(info)
            yield needed + kept_free
            kept_free = 0

    def _adapters_at_work(self) -> set[int] | None:
        """LoRA adapters of running requests, where vLLM admits no other; None where it does."""
        if self.lora_config is None:
            return None
        running = {r.lora_request.lora_int_id for r in self.running if r.lora_request}
        return running if len(running) >= self.lora_config.max_loras else None

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """vLLM's statistics, with the policy's; None where they are switched off.

        A liberty: they ride in ``running_lora_adapters``, a mapping of integers that the scheduler
        leaves empty and that nobody reads without LoRA. ``kv_connector_stats``, which takes any
        payload, would stop a front end that does not know ours: its log has no connector to ask.
        """
        self._settle()
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            self.stats_reporter.report().put_into(stats.running_lora_adapters)
        return stats

    def check_integrity(self) -> None:
        """Check pages and lengths, and that lengths are the ones vLLM counts.

        Raises:
            IntegrityError: with the numbers.

        """
        self.manager.check_integrity()
        for request_id, state in self.ledger.states.items():
            request = self.requests[request_id]
            computed = request.num_computed_tokens
            # A stopped session is rolled back to its last sampled token; with its next part it goes
            # on if there is nothing to take back.
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
        """What a request finds computed, but for what it must compute itself.

        ``limits`` are vLLM's own; 0.33 has one, 0.32 none. Windows are cached where a hit ends, and
        perhaps not before that: next to them it looks again, no further than it may reach.
        """
        find = super()._get_local_prefix_cache_hit
        blocks, num_cached, *rest = find(request, *limits)
        if self._prefix_caching and (num_cached or self.windows.managers):
            own = self.ledger.max_cached_tokens(self.manager.info_of(request))
            num_written = self.manager.num_written(blocks.blocks[self.manager.kv_cache_group_id])
            limit = min(own, num_written * self.manager.block_size)
            if self.windows.managers:
                if num_cached > limit:
                    blocks, num_cached, *rest = find(request, limit)
                # vLLM keeps windows for who asks for the same again.
                rest[0] = min(rest[0] or own, own)
            elif num_cached > limit:
                blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, limit)
                num_cached = limit
        num_begun = self.manager.continue_from(request, num_cached)
        if num_begun > num_cached:
            return self.kv_cache_manager.empty_kv_cache_blocks, num_begun, *rest
        return blocks, num_cached, *rest

    def _second_pass_chunk(self) -> int:
        """What a step has room for next to a token of each other sequence, or half of it all."""
        limits, max_tokens = self.scheduler_config, self.max_num_scheduled_tokens
        others = (limits.max_num_seqs - 1) * (1 + self.num_spec_tokens)
        room = max(max_tokens - others, max_tokens // 2, 1)
        return min(room, limits.long_prefill_token_threshold or room)

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        """A streaming input's next part: after what is resident, or all of it from the start."""
        super()._update_request_as_session(session, update)
        # Chunks of a prompt take every token for one.
        if self.policy_config.merges or not self.manager.extend(session):
            self._free_request_blocks(session)
            session.num_computed_tokens = 0

    def _budget_of(self, request: Request) -> Budget | None:
        """A request's own budget, from its original prompt: the same when it is resumed."""
        params = request.sampling_params
        engine = (self.max_model_len, self.manager.block_size)
        lengths = (*engine, request.num_prompt_tokens, request.max_tokens)
        try:
            asked = asked_budget(params.extra_args) if params else None
            budget = budget_of(self.policy_config, *lengths, asked)
            if budget is not None:
                chunk = self.scheduler_config.max_num_batched_tokens
                longest = request.num_prompt_tokens + request.max_tokens
                check_positions(self.policy_config, "a budget", budget, chunk, longest)
            return budget
        except ConfigError as error:
            # Checked where requests enter; the prompt of a session grows afterwards.
            logger.warning_once("%s It gets the engine's budget.", error)
            return budget_of(self.policy_config, *lengths, None)

    def _managers(self, kv_cache_config: KVCacheConfig) -> tuple[HeavyHitterManager, Windows]:
        """The policy's, and those of sliding windows.

        Scores are not K or V: pages that a window takes are cleared before they are written to.
        """
        unbounded = self._prefix_caching and not bounds_hits(self.vllm_config)
        config = self.policy_config
        further = config.continuation or config.position_limit is not None
        further = further or config.splits_layers or config.ranking.reads_again
        alone = unbounded or further or self.num_spec_tokens > 0
        own = policy_group(kv_cache_config, alone)
        managers = list(self.kv_cache_manager.coordinator.single_type_managers)
        manager = managers.pop(own)
        assert isinstance(manager, HeavyHitterManager)
        for other in managers:
            # A liberty: vLLM does this where caches differ in their dtype.
            self.needs_kv_cache_zeroing = other._record_new_block_ids = True
            # A liberty: they publish what the policy's group does.
            other.cache_blocks = partial(manager.publish, other, other.cache_blocks)
        return manager, Windows(managers)

    def _conversations(self) -> Conversations:
        hash_fn = get_hash_fn_by_name(self.cache_config.prefix_caching_hash_algo)
        by_seed = self.policy_config.policy.score is ScoreKind.RANDOM
        manager = self.manager
        return Conversations(manager.block_pool, manager.kv_cache_group_id, hash_fn, by_seed)

    def _log_meaning(self, config: KVPolicyConfig) -> None:
        budget, spec = self.ledger.budget, self.manager.kv_cache_spec
        assert isinstance(spec, HeavyHitterSpec)
        slots = min(budget.capacity, self.max_model_len)
        pool = Pool(self.kv_cache_config.num_blocks, self.manager.block_size)
        num_bytes = pool.num_blocks * spec.unpadded_page_size_bytes
        stock = Pool(num_bytes // spec.stock_page_size_bytes, pool.block_size)
        others = pool.pages_of_windows(
            self.windows.sizes, self.max_model_len, self.vllm_config.max_concurrent_batches
        )
        if config.splits:
            who = (
                "all layers' KV heads share" if config.splits_layers else "a layer's KV heads share"
            )
            logger.info("%s: %s slots; counts are means.", config.name, who)
        logger.info(
            "%s: past its prompt a sequence holds %s%d tokens (%s) = %d pages of %d; the pool of "
            "%d pages holds %d sequences of max_model_len=%d at once, stock vLLM in the same "
            "memory %d.",
            config.name,
            "" if config.budget_basis == "max_model_len" else "at most ",
            budget.capacity,
            budget.parts,
            pool.pages_of(slots),
            pool.block_size,
            pool.num_pages,
            pool.num_sequences(slots, others),
            self.max_model_len,
            stock.num_sequences(self.max_model_len, others),
        )
        if others:
            groups = self.kv_cache_config.kv_cache_groups
            own = len(groups[self.manager.kv_cache_group_id].layer_names)
            logger.info(
                "%s: that is of %d layers with full attention; the other %d keep the tokens of "
                "their sliding windows, in up to %d pages more of each sequence.",
                config.name,
                own,
                sum(len(group.layer_names) for group in groups) - own,
                others,
            )
        if self.ledger.position_limit is not None:
            num_seqs = self.scheduler_config.max_num_seqs
            logger.info(
                "%s: positions roll below %d; the rows of %d sequences of max_model_len=%d take "
                "%d MiB in each worker, for ids of tokens and pages (--max-num-seqs).",
                config.name,
                self.ledger.position_limit,
                num_seqs,
                self.max_model_len,
                row_bytes(num_seqs, self.max_model_len, pool.block_size) >> 20,
            )
        if self.ledger.under_pressure:
            logger.info(
                "%s: eviction=pressure: so much when memory is short; until then a sequence holds "
                "every token, and the pool %d sequences of max_model_len=%d.",
                config.name,
                pool.num_sequences(self.max_model_len, others),
                self.max_model_len,
            )
