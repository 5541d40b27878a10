"""A plan and a block table become exactly these tensors."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from tests.kernels.harness import Shape, builder, common_metadata
from vllm_h2o.engine import WORKER
from vllm_h2o.errors import IntegrityError
from vllm_h2o.wire import RequestPlan, ResidencyPlan
from vllm_h2o.worker.metadata import (
    MAX_BATCH_ELEMENTS,
    HeavyHitterMetadata,
    HeavyHitterMetadataBuilder,
)
from vllm_h2o.worker.step import Step, WarmUp, publish

SHAPE = Shape(num_kv_heads=2, block_size=16)
PLANS = {
    "first chunk": RequestPlan(0, 20, True, 0, 32, 0, 10, 2, 7),
    "full": RequestPlan(90, 1, False, 32, 32, 0, 12, 3, 8),
    "last chunk": RequestPlan(40, 5, True, 40, 32, 31, 10, 2, 9),
    "growing": RequestPlan(17, 1, False, 17, 48, 0, 12, 0, 1),
    "becomes full": RequestPlan(60, 1, False, 31, 32, 0, 0, 4, 2),
}
TABLE = torch.tensor(
    [
        [5, 6, 91, 92],  # first chunk: 20 slots
        [9, 3, 93, 94],  # full: 32 slots
        [1, 7, 4, 95],  # last chunk: 45 slots
        [8, 2, 96, 97],  # growing: 18 slots
        [11, 10, 98, 99],  # becomes full: 32 slots
        [0, 0, 0, 0],  # padding
    ],
    dtype=torch.int32,
)


def build(names: list[str], num_padding: int = 0) -> HeavyHitterMetadata:
    """Metadata of a batch with one row for each name, and rows of padding without tokens."""
    plans = {name: PLANS[name] for name in sorted(names)}
    rows = [list(PLANS).index(name) for name in names] + [5] * num_padding
    lengths = [PLANS[name].num_new for name in names] + [0] * num_padding
    with publish(Step(ResidencyPlan(plans), lambda _: names)):
        return builder(SHAPE, "h2o").build(0, common_metadata(lengths, TABLE[rows]))


def rows_of(blocks: list[int]) -> list[list[int]]:
    """[H, P] rows of two KV heads."""
    return [[2 * block for block in blocks], [2 * block + 1 for block in blocks]]


def test_prompts_one_by_one() -> None:
    """Each chunk has its tokens, its own pages only, its slots and what survives it."""
    first, last = build(list(PLANS)).prompts
    assert (first.tokens, first.rows.tolist()) == (slice(0, 20), rows_of([5, 6]))
    assert (first.start, first.end, first.position, first.keep) == (0, 20, 0, 0)
    assert (last.tokens, last.rows.tolist()) == (slice(21, 26), rows_of([1, 7, 4]))
    assert (last.start, last.end, last.position, last.keep) == (40, 45, 40, 31)
    assert (last.recent_from, last.num_sinks, last.seed) == (35, 2, 9)
    assert last.rows.dtype == torch.int64


def test_decodes_together() -> None:
    """Requests past their prompt share one batch, in order of rows, as wide as the longest."""
    (batch,) = build(list(PLANS)).decodes
    assert batch.rows.tolist() == [rows_of([9, 3]), rows_of([8, 2]), rows_of([11, 10])]
    columns = {f.name: getattr(batch, f.name).tolist() for f in fields(batch) if f.name != "rows"}
    assert columns == {
        "token": [20, 26, 27],
        "attended": [32, 18, 32],
        "append_slot": [31, 17, 31],
        "overwrites": [True, False, False],
        "selects": [True, False, True],
        "owner": [9, 8, 11],
        "position": [90, 17, 60],
        "recent_from": [91 - 12, 18 - 12, 61],
        "num_sinks": [3, 0, 4],
        "seed": [8, 1, 2],
    }
    for field in fields(batch):
        flag = field.name in ("overwrites", "selects")
        assert getattr(batch, field.name).dtype == (torch.bool if flag else torch.int64)


def test_order_is_the_batchs() -> None:
    """Rows may come in any order, whatever the plan's."""
    metadata = build(["growing", "last chunk", "becomes full", "first chunk"])
    assert metadata.decodes[0].token.tolist() == [0, 6]
    assert metadata.decodes[0].owner.tolist() == [8, 11]
    assert [chunk.tokens for chunk in metadata.prompts] == [slice(1, 6), slice(7, 27)]
    assert [chunk.rows[0, 0].item() for chunk in metadata.prompts] == [2, 10]


def test_only_prompts_or_only_decodes() -> None:
    """Without requests past their prompt there is no decode batch, and the reverse."""
    assert build(["last chunk"]).decodes == []
    assert build(["full"]).prompts == []


def test_padding_is_no_request() -> None:
    """Rows without tokens behind the batch's add nothing."""
    (batch,) = build(["full"], num_padding=3).decodes
    assert batch.rows.tolist() == [rows_of([9, 3])]


def test_a_page_more_at_its_first_slot() -> None:
    """A page belongs to the batch from the step in which its first slot is taken."""
    for resident, pages in ((15, [5]), (16, [5, 6]), (31, [5, 6]), (32, [5, 6, 91])):
        plan = RequestPlan(resident, 1, False, resident, 48, 0, 12, 0, 0)
        with publish(Step(ResidencyPlan({"a": plan}), lambda _: ["a"])):
            (batch,) = builder(SHAPE, "h2o").build(0, common_metadata([1], TABLE[:1])).decodes
        assert batch.rows.tolist() == [rows_of(pages)]


@pytest.mark.parametrize(("resident", "selects"), [(46, False), (47, True), (48, True)])
def test_selection_starts_when_full(resident: int, selects: bool) -> None:
    """A victim is chosen from the step on that takes the last slot; before it, none is."""
    plan = RequestPlan(resident, 1, False, resident, 48, 0, 12, 0, 0)
    with publish(Step(ResidencyPlan({"a": plan}), lambda _: ["a"])):
        (batch,) = builder(SHAPE, "h2o").build(0, common_metadata([1], TABLE[:1])).decodes
    assert batch.selects.tolist() == [selects]
    assert batch.overwrites.tolist() == [resident == 48]


def test_no_step_is_empty() -> None:
    """Warm-up, profiling and capture get metadata with which nothing is read or written."""
    with publish(WarmUp()):
        metadata = builder(SHAPE, "h2o").build(0, common_metadata([3, 1], TABLE[:2]))
    assert metadata.decodes == [] and metadata.prompts == []


def test_neither_step_nor_warm_up_is_refused() -> None:
    """A real step whose plan got lost on the way must not pass for a warm-up."""
    with pytest.raises(IntegrityError, match="outside a step"):
        builder(SHAPE, "h2o").build(0, common_metadata([3, 1], TABLE[:2]))


def test_a_long_request_pads_no_short_one() -> None:
    """Batches are of about one length, and no larger than a call may gather."""
    lengths = [1, 9, 1, 70, 2, 64]  # pages
    plans = {
        str(i): RequestPlan(16 * n - 1, 1, False, 16 * n - 1, 2048, 0, 12, 0, 0)
        for i, n in enumerate(lengths)
    }
    table = torch.arange(6 * 80, dtype=torch.int32).view(6, 80)
    step = Step(ResidencyPlan(plans), lambda _: list(plans))
    few = builder(SHAPE, "h2o")
    few.page_elements = MAX_BATCH_ELEMENTS // 8
    for made, tokens in ((builder(SHAPE, "h2o"), [[0, 2], [1], [3, 5], [4]]), (few, None)):
        with publish(step):
            batches = made.build(0, common_metadata([1] * 6, table)).decodes
        found = [batch.token.tolist() for batch in batches]
        assert found == (tokens or [[0, 2], [1], [3], [4], [5]])
        for batch in batches:
            assert batch.rows.shape[2] == max(lengths[i] for i in batch.token.tolist())


def test_another_batch_is_refused() -> None:
    """A batch that was not planned becomes no tensors."""
    step = Step(ResidencyPlan({"full": PLANS["full"]}), lambda _: ["full"])
    with publish(step), pytest.raises(IntegrityError, match="the plan is for"):
        builder(SHAPE, "h2o").build(0, common_metadata([2], TABLE[1:2]))


def test_another_worker_is_refused() -> None:
    """A worker that publishes no steps is refused at the start, not at the first request."""
    config = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls="somebody.Worker"))
    spec = builder(SHAPE, "h2o").kv_cache_spec
    with pytest.raises(IntegrityError, match=f"runs in somebody.Worker, not in {WORKER}"):
        HeavyHitterMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


def test_the_table_is_not_kept() -> None:
    """vLLM refills its block table for the next step while this one's tensors are still read."""
    table = TABLE.clone()
    names = list(PLANS)
    lengths = [plan.num_new for plan in PLANS.values()]
    common: CommonAttentionMetadata = common_metadata(lengths, table[:5])
    with publish(Step(ResidencyPlan(PLANS), lambda _: names)):
        metadata = builder(SHAPE, "h2o").build(0, common)
    table.zero_()
    assert metadata.decodes[0].rows.tolist()[0] == rows_of([9, 3])
    assert metadata.decodes[0].owner.tolist() == [9, 8, 11]
    assert metadata.prompts[0].rows.tolist() == rows_of([5, 6])
