# SPDX-License-Identifier: Apache-2.0
"""Which plan belongs to which row, and that no step runs without one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu import states
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.kernels.metadata import common_metadata
from vllm_h2o.errors import IntegrityError
from vllm_h2o.policy import Budget
from vllm_h2o.wire import RequestPlan, ResidencyPlan
from vllm_h2o.worker.step import (
    PublishesSteps,
    Step,
    current_step,
    publish,
    v1_row_order,
    v2_row_order,
)


@pytest.fixture(autouse=True)
def one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers here have no process group."""
    monkeypatch.setattr(
        "vllm_h2o.worker.step.get_pp_group", lambda: SimpleNamespace(is_last_rank=True)
    )


NO_OUTPUT: Any = None
"""V1's order does not depend on the schedule."""


def common(lengths: list[int], req_idx: np.ndarray | None = None) -> CommonAttentionMetadata:
    """vLLM's metadata of a batch with rows of ``lengths`` tokens."""
    table = torch.zeros(len(lengths), 1, dtype=torch.int32)
    return common_metadata(lengths, table).replace(req_idx=req_idx)


def plans(**lengths: int) -> ResidencyPlan:
    """A plan that computes so many tokens of each request."""
    return ResidencyPlan(
        {
            request_id: RequestPlan(
                logical_start=0,
                num_new=num_new,
                prompt_end=num_new,
                resident_start=0,
                budget=Budget(64, 59, 4, 0),
            )
            for request_id, num_new in lengths.items()
        }
    )


def scheduled(plan: ResidencyPlan) -> SimpleNamespace:
    """What the scheduler sends with a plan, as far as publishing reads it."""
    return SimpleNamespace(residency_plan=plan, finished_req_ids=set())


class HostBuffer:
    """Stands for V2's buffers, which need pinned memory that a CPU build has not."""

    def __init__(self, size: Any, *_: Any, **__: Any) -> None:
        self.np = np.zeros(size, dtype=np.int32)

    def stage_write(self, *_: Any) -> None:
        """Nothing reads the device's copy here."""

    stage_write_elem = stage_write


@pytest.fixture
def v2_states(monkeypatch: pytest.MonkeyPatch) -> states.RequestState:
    """The request table of Model Runner V2, with one request gone and its place taken again."""
    monkeypatch.setattr(states, "UvaBackedTensor", HostBuffer)
    monkeypatch.setattr(states, "StagedWriteTensor", HostBuffer)
    table = states.RequestState(4, 16, 16, 0, 8, torch.device("cpu"))
    for request_id in ("a", "gone", "b"):
        table.add_request(request_id, 3, [1, 2, 3], 0, 4)
    table.remove_request("gone")
    table.add_request("c", 3, [1, 2, 3], 0, 4)
    return table


def v2_runner(table: states.RequestState) -> Any:
    """As much of V2's runner as orders the rows of a batch."""
    runner = SimpleNamespace(
        req_states=table,
        decode_query_len=1,
        use_pp=False,
        pcp_manager=None,
        adaptive_verification=None,
    )
    runner.gather_batch_req_state = MethodType(GPUModelRunner.gather_batch_req_state, runner)
    return runner


def v2_scheduled(lengths: dict[str, int]) -> Any:
    """What the scheduler sends, as far as that order depends on it."""
    return SimpleNamespace(
        num_scheduled_tokens=lengths,
        total_num_scheduled_tokens=sum(lengths.values()),
        scheduled_spec_decode_tokens={},
    )


def v2_rows(table: states.RequestState, lengths: dict[str, int]) -> Any:
    """The batch's rows as V2's own code orders them."""
    batch, _ = v2_runner(table).gather_batch_req_state(v2_scheduled(lengths), False)
    return batch


def test_v2_rows_follow_req_idx(v2_states: states.RequestState) -> None:
    """V2 sorts a batch by length; each row still gets its own request's plan."""
    lengths = {"a": 3, "b": 1, "c": 2}
    batch = v2_rows(v2_states, lengths)
    assert batch.req_ids == ["b", "c", "a"]
    metadata = common([lengths[r] for r in batch.req_ids], batch.idx_mapping_np)
    order = v2_row_order(v2_runner(v2_states), v2_scheduled(lengths))
    assert order(metadata) == batch.req_ids
    plan = plans(**lengths)
    rows = Step(plan, order).rows(metadata)
    assert rows.request_ids == batch.req_ids
    assert rows.plans == [plan.requests[r] for r in batch.req_ids]


def test_v2_padding_rows_have_no_plan(v2_states: states.RequestState) -> None:
    """Rows that pad a captured graph have no tokens, and req_idx does not name them."""
    batch = v2_rows(v2_states, {"a": 1, "b": 1})
    order = v2_row_order(v2_runner(v2_states), v2_scheduled({"a": 1, "b": 1}))
    rows = Step(plans(a=1, b=1), order).rows(common([1, 1, 0, 0], batch.idx_mapping_np))
    assert (len(rows.plans), rows.num_rows) == (2, 4)


def test_v2_rows_of_a_hybrid_model(v2_states: states.RequestState) -> None:
    """Its metadata has no req_idx: rows are those of the schedule, in the order of V2's own."""
    lengths = {"a": 3, "b": 1, "c": 2}
    order = v2_row_order(v2_runner(v2_states), v2_scheduled(lengths))
    assert order(common([1, 2, 3])) == ["b", "c", "a"]


def test_v1_rows_follow_the_persistent_batch() -> None:
    """V1 names its rows itself, and re-orders them between steps."""
    batch = SimpleNamespace(req_ids=["b", "a"])
    order = v1_row_order(SimpleNamespace(input_batch=batch), NO_OUTPUT)
    plan = plans(a=2, b=5)
    assert [p.num_new for p in Step(plan, order).rows(common([5, 2, 0])).plans] == [5, 2]
    batch.req_ids = ["a", "b"]
    assert [p.num_new for p in Step(plan, order).rows(common([2, 5])).plans] == [2, 5]


@pytest.mark.parametrize("lengths", [[5, 2], [2], [2, 5, 1], [2, 4]])
def test_another_batch_is_refused(lengths: list[int]) -> None:
    """Rows that were not planned, or with other lengths, never reach the kernels."""
    order = v1_row_order(
        SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a", "b", "x"])), NO_OUTPUT
    )
    with pytest.raises(IntegrityError, match="the plan is for"):
        Step(plans(a=2, b=5), order).rows(common(lengths))


@pytest.mark.parametrize("ids", [["a"], ["a", "x"], ["a", "a"], []])
def test_another_request_is_refused(ids: list[str]) -> None:
    """A row of a request that was not planned, and a planned one without a row, stop the step."""
    order = v1_row_order(SimpleNamespace(input_batch=SimpleNamespace(req_ids=ids)), NO_OUTPUT)
    with pytest.raises(IntegrityError, match="the plan is for"):
        Step(plans(a=1, b=1), order).rows(common([1] * len(ids) or [0]))


class Stock:
    """vLLM's worker, which here returns the step that it sees."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """The current step."""
        return current_step()

    def determine_available_memory(self) -> Any:
        """A step that vLLM makes up for itself."""
        return self.execute_model(SimpleNamespace())

    compile_or_warm_up_model = execute_dummy_batch = determine_available_memory


class Worker(PublishesSteps, Stock):
    """A worker with a policy."""

    def __init__(self, use_v2_model_runner: bool) -> None:
        self.use_v2_model_runner = use_v2_model_runner
        self.model_runner = SimpleNamespace(
            input_batch=SimpleNamespace(req_ids=["a"]),
            req_states=SimpleNamespace(index_to_req_id={3: "a"}),
        )


@pytest.mark.parametrize("v2", [False, True])
def test_a_step_is_published_while_it_runs(v2: bool) -> None:
    """The plan is there during the step, with the runner's own row order, and gone after."""
    plan = plans(a=1)
    step = Worker(v2).execute_model(scheduled(plan))
    assert step.plan == plan
    rows = step.rows(common([1], np.array([3]) if v2 else None))
    assert rows.plans == [plan.requests["a"]]
    nothing_is_published()


def nothing_is_published() -> None:
    """Neither a step nor a warm-up."""
    with pytest.raises(IntegrityError, match="outside execute_model"):
        current_step()


@pytest.mark.parametrize(
    "method", ["determine_available_memory", "compile_or_warm_up_model", "execute_dummy_batch"]
)
def test_a_warm_up_has_no_plan_and_says_so(method: str) -> None:
    """Even where, as with Model Runner V2, it runs made-up schedules through the worker."""
    assert getattr(Worker(True), method)() is None
    nothing_is_published()


def test_a_step_without_a_plan_is_refused() -> None:
    """Another scheduler's output stops the worker instead of running full attention."""
    with pytest.raises(IntegrityError, match="without a plan"):
        Worker(False).execute_model(SimpleNamespace())


def test_publish_is_undone_after_an_error() -> None:
    """A step that fails leaves no plan for the next batch to find."""
    with pytest.raises(RuntimeError), publish(Step(plans(a=1), lambda _: ["a"])):
        raise RuntimeError
    nothing_is_published()


class Leaving(Stock):
    """vLLM's worker, whose steps leave work behind that is noted when it is done."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def execute_model(self, scheduler_output: Any) -> Any:
        """A step, which fails where its schedule says so."""
        step = current_step()
        self.done.append("forward")
        if step is None or not step.plan.requests:
            return "empty"
        for name in ("restore", "pack", "reread", "unroll"):
            step.after.add(name, SimpleNamespace(run=partial(self.done.append, name)))
        with pytest.raises(IntegrityError, match="two pieces of work to pack"):
            step.after.add("pack", SimpleNamespace())
        assert self.done[-1] == "forward"
        return None

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Which needs what the forward pass gave, and no more."""
        self.done.append("sample")
        return "tokens"

    def execute_dummy_batch(self) -> Any:
        """With metadata of its own."""
        self.done.append("dummy")

    def sleep(self, level: int = 1) -> Any:
        """Give the pages back."""
        self.done.append(f"sleep {level}")

    def discard(self, tags: tuple[str, ...]) -> Any:
        """Give some memory back."""
        self.done.append(f"discard {tags}")

    def reload_weights(self, *args: Any, **kwargs: Any) -> Any:
        """From a checkpoint."""
        self.done.append("reload")

    def start_weight_update(self) -> Any:
        """From a trainer."""
        self.done.append("update")


class LeavingWorker(PublishesSteps, Leaving):
    """A worker with a policy."""

    use_v2_model_runner = False
    model_runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a"]))


NOW, LATER = ["forward", "unroll"], ["reread", "pack", "restore"]


def test_a_step_is_finished_when_the_next_begins() -> None:
    """Tokens are sampled and handed out before anything is packed, and before the next forward."""
    worker = LeavingWorker()
    for _ in range(2):
        assert worker.execute_model(scheduled(plans(a=1))) is None
        assert worker.done[-2:] == NOW
        assert worker.sample_tokens(None) == "tokens"
    assert worker.done == [*NOW, "sample", *LATER, *NOW, "sample"]
    # A step of no tokens, after which vLLM does not sample.
    assert worker.execute_model(scheduled(plans())) == "empty"
    assert worker.done[-4:] == [*LATER, "forward"]
    assert worker.execute_model(scheduled(plans())) == "empty"
    assert worker.done[-1] == "forward"


def test_a_step_that_is_not_sampled_is_finished() -> None:
    """The next one finishes it all the same, once."""
    worker = LeavingWorker()
    worker.execute_model(scheduled(plans(a=1)))
    worker.execute_model(scheduled(plans(a=1)))
    assert worker.done == [*NOW, *LATER, *NOW]


def test_a_step_is_finished_before_its_pages_or_tables_go() -> None:
    """A dummy batch overwrites the runner's tables, sleep frees the cache, weights change."""
    worker = LeavingWorker()
    ends: list[tuple[Callable[[], Any], str]] = [
        (worker.execute_dummy_batch, "dummy"),
        (worker.sleep, "sleep 1"),
        (partial(worker.discard, ("kv_cache",)), "discard ('kv_cache',)"),
        (worker.reload_weights, "reload"),
        (worker.start_weight_update, "update"),
    ]
    for end, last in ends:
        worker.execute_model(scheduled(plans(a=1)))
        end()
        assert worker.done == [*NOW, *LATER, last]
        worker.done.clear()


def test_a_stage_that_samples_nothing_finishes_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token waits there, and the next stage computes meanwhile."""
    monkeypatch.setattr(
        "vllm_h2o.worker.step.get_pp_group", lambda: SimpleNamespace(is_last_rank=False)
    )
    worker = LeavingWorker()
    worker.execute_model(scheduled(plans(a=1)))
    assert worker.done == [*NOW, *LATER]
    worker.execute_model(scheduled(plans()))
    assert worker.done == [*NOW, *LATER, "forward"]
