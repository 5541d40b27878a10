# SPDX-License-Identifier: Apache-2.0
"""Brings the scheduler's plan to the metadata builder: published for as long as a step runs.

``Worker.execute_model`` is the one place that both model runners pass through with a real schedule.
Profiling, warm-up and graph capture have no plan, and are published as what they are: attention
metadata that is built outside both is an error.

A step ends when the next one begins: survivors are packed then, and the worker has handed out the
tokens that it sampled. Workers get steps in order, however many are in flight, so packing precedes
whatever reads or takes the pages. If no other step comes, no request is left that needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_pp_group
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_h2o.errors import IntegrityError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.wire import Plans, ResidencyPlan
from vllm_h2o.worker.after_step import AfterStep
from vllm_h2o.worker.batching import Rows
from vllm_h2o.worker.drafts import DraftQueries
from vllm_h2o.worker.files import Writer
from vllm_h2o.worker.peak import profiling
from vllm_h2o.worker.reconstruction import Reader
from vllm_h2o.worker.turns import Turns, pages_of

RowOrder = Callable[[CommonAttentionMetadata], Sequence[str]]
"""The request id of each row of a batch."""


@dataclass(frozen=True)
class Step:
    """A plan, and the way to find each batch row's request.

    Args:
        plan: of the step.
        row_order: of the batch.
        after: work that follows the forward pass.
        draft_queries: of earlier steps; those of this one are added.
        reader: what reads prompts again.

    """

    plan: ResidencyPlan
    row_order: RowOrder
    after: AfterStep = field(default_factory=AfterStep)
    draft_queries: DraftQueries = field(default_factory=dict)
    reader: Reader | None = None

    def order(self, common: CommonAttentionMetadata) -> list[str]:
        """The request of each row that has tokens."""
        return list(self.row_order(common)[: len(self.plan.requests)])

    def rows(self, common: CommonAttentionMetadata, num_window_queries: int | None = None) -> Rows:
        """The rows of the batch, each with its request and its plan.

        Args:
            common: vLLM's metadata of the batch.
            num_window_queries: queries at a prompt's end that add to scores; None: all of it do.

        Raises:
            IntegrityError: when the batch is not the one that was planned.

        """
        starts = common.query_start_loc_cpu.tolist()
        order = self.order(common)
        if set(order) != self.plan.requests.keys():
            raise IntegrityError(
                f"the batch has rows of {order}, the plan is for {list(self.plan.requests)}"
            )
        plans = [self.plan.requests[request_id] for request_id in order]
        lengths = [end - start for start, end in zip(starts, starts[1:], strict=False)]
        if [plan.num_new for plan in plans] != lengths[: len(plans)] or any(lengths[len(plans) :]):
            raise IntegrityError(
                f"the batch has rows of {lengths} tokens, the plan is for "
                f"{[plan.num_new for plan in plans]} of {order}"
            )
        table = common.block_table_tensor
        return Rows(order, plans, table, starts, common.num_reqs, num_window_queries)


class WarmUp:
    """Published in a step's place while vLLM profiles, warms up, captures, or idles in lockstep."""


_STEP: ContextVar[Step | WarmUp | None] = ContextVar("vllm_h2o_step", default=None)


def current_step() -> Step | None:
    """The step that runs in this context; None during warm-up.

    Raises:
        IntegrityError: when neither was published: a real step would pass for a warm-up.

    """
    step = _STEP.get()
    if step is None:
        raise IntegrityError(
            "attention metadata is built outside execute_model: there is no residency plan"
        )
    return None if isinstance(step, WarmUp) else step


@contextmanager
def publish(step: Step | WarmUp) -> Iterator[None]:
    """Make ``step`` the current one."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def v1_row_order(model_runner: Any, _: SchedulerOutput) -> RowOrder:
    """Rows of V1's persistent batch."""
    return lambda common: model_runner.input_batch.req_ids


def v2_row_order(model_runner: Any, scheduler_output: SchedulerOutput) -> RowOrder:
    """Rows of Model Runner V2, which names each by its index in the runner's request table.

    For hybrid models it names none; their rows are put in order again, as it did.
    """

    def order(common: CommonAttentionMetadata) -> Sequence[str]:
        if common.req_idx is None:
            batch, _ = model_runner.gather_batch_req_state(scheduler_output, False)
            return list(batch.req_ids)
        ids = model_runner.req_states.index_to_req_id
        return [ids[index] for index in common.req_idx.tolist()]

    return order


class PublishesSteps:
    """Mixed into vLLM's worker class: publishes each step, or that it is none, to the builder."""

    model_runner: Any
    use_v2_model_runner: bool
    vllm_config: VllmConfig
    _draft_queries: DraftQueries | None = None
    _plans: Plans | None = None
    _turns: Turns | None = None
    _unfinished: Step | None = None

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """The layers' pages, which depend on the policy: vLLM asks without a current config."""
        with set_current_vllm_config(self.vllm_config):
            specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()  # type: ignore[misc]
        return specs

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Which the policy says, too."""
        with set_current_vllm_config(self.vllm_config):
            layouts: list[str] = super().get_supported_kv_cache_layouts()  # type: ignore[misc]
        return layouts

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run one step of the schedule, or one that Model Runner V2 makes up to warm up.

        Raises:
            IntegrityError: when a real schedule carries no plan.

        """
        if isinstance(_STEP.get(), WarmUp):
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        self.finish_step()
        if not hasattr(scheduler_output, "residency_plan"):
            raise IntegrityError(
                "a step reached the worker without a plan: HeavyHitterScheduler did not schedule it"
            )
        rows = v2_row_order if self.use_v2_model_runner else v1_row_order
        if self._draft_queries is None or self._plans is None:
            self._draft_queries, self._plans = {}, Plans()
        gone = scheduler_output.finished_req_ids
        for request_id in gone:
            self._draft_queries.pop(request_id, None)
        order = rows(self.model_runner, scheduler_output)
        plan = self._plans.complete(scheduler_output.residency_plan, gone)
        scheduler_output.residency_plan = plan
        if plan.continued or plan.saved or plan.dropped:
            self._begin_turns(plan)
        step = Step(plan, order, draft_queries=self._draft_queries, reader=Reader(self))
        with publish(step):
            result = super().execute_model(scheduler_output)  # type: ignore[misc]
        step.after.run_before_sampling()
        self._unfinished = step
        if not get_pp_group().is_last_rank:  # it samples nothing that would wait
            self.finish_step()
        return result

    def _begin_turns(self, plan: ResidencyPlan) -> None:
        """Copy caches of ended requests, before the step clears pages that it takes."""
        if self._turns is None:
            parallel = self.vllm_config.parallel_config
            most_bytes = KVPolicyConfig.required(self.vllm_config).continuation_folder_bytes
            self._turns = Turns(Writer(parallel.rank, parallel.world_size, most_bytes))
        runner, context = self.model_runner, self.vllm_config.compilation_config
        groups = runner.kv_cache_config.kv_cache_groups
        pages = list(pages_of(groups, context.static_forward_context))
        self._turns.begin(plan, pages, runner.device)

    def finish_step(self) -> ResidencyPlan | None:
        """Reread, pack and restore, unless the last step is finished.

        The model runner's block table and tokens must still be those of the step.

        Returns:
            The plan of the step that this has finished.

        """
        step, self._unfinished = self._unfinished, None
        if step is None:
            return None
        step.after.run()
        return step.plan

    def determine_available_memory(self) -> Any:
        """Profile, without a plan, and with what layers will allocate."""
        with publish(WarmUp()), profiling():
            return super().determine_available_memory()  # type: ignore[misc]

    def compile_or_warm_up_model(self) -> Any:
        """Compile, warm up and capture, without a plan."""
        with publish(WarmUp()):
            return super().compile_or_warm_up_model()  # type: ignore[misc]

    def execute_dummy_batch(self) -> Any:
        """Keep step with other engines, without a plan; it overwrites the last step's tables."""
        self.finish_step()
        with publish(WarmUp()):
            return super().execute_dummy_batch()  # type: ignore[misc]

    def sleep(self, level: int = 1) -> Any:
        """Finish the step before its pages go."""
        self.finish_step()
        return super().sleep(level)  # type: ignore[misc]

    def discard(self, tags: tuple[str, ...]) -> Any:
        """Finish the step before its pages go."""
        self.finish_step()
        return super().discard(tags)  # type: ignore[misc]

    def reload_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Finish the step with the weights that began it."""
        self.finish_step()
        return super().reload_weights(*args, **kwargs)  # type: ignore[misc]

    def start_weight_update(self) -> Any:
        """Finish the step with the weights that began it."""
        self.finish_step()
        return super().start_weight_update()  # type: ignore[misc]
