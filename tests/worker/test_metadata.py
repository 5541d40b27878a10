# SPDX-License-Identifier: Apache-2.0
"""A plan and a block table become exactly these tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.caches import on_triton
from tests.kernels.harness import Layer, Shape, builder, empty_cache
from tests.kernels.metadata import common_metadata
from vllm_h2o.errors import IntegrityError
from vllm_h2o.kernels.batch import DECODE_FIELDS, DecodeBatch
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.paths import WORKER
from vllm_h2o.policy import Budget
from vllm_h2o.wire import RequestPlan, ResidencyPlan
from vllm_h2o.worker.batching import MAX_BATCH_ELEMENTS, Batching, CopiedBatches, PersistentBatch
from vllm_h2o.worker.metadata import HeavyHitterMetadata, HeavyHitterMetadataBuilder
from vllm_h2o.worker.step import Step, WarmUp, publish

SHAPE = Shape(num_kv_heads=2, block_size=16)


def budget(capacity: int = 32, num_recent: int = 0, num_sinks: int = 0) -> Budget:
    """Slots of a request that evicts a token with each new one."""
    return Budget(capacity, capacity - 1 - num_recent - num_sinks, num_recent, num_sinks)


def decoding(**numbers: Any) -> RequestPlan:
    """One token after a prompt of one token, of a request of 32 slots unless told otherwise."""
    return RequestPlan(**{"num_new": 1, "prompt_end": 1, "budget": budget(), **numbers})


LAST_CHUNK = RequestPlan(
    logical_start=40,
    num_new=5,
    prompt_end=45,
    resident_start=40,
    budget=budget(32, 10, 2),
    num_survivors=31,
)
PLANS = {
    "first chunk": RequestPlan(
        logical_start=0, num_new=20, prompt_end=30, resident_start=0, budget=budget(32, 10, 2)
    ),
    "full": decoding(logical_start=90, resident_start=32, budget=budget(32, 12, 3)),
    "last chunk": LAST_CHUNK,
    "growing": decoding(logical_start=17, resident_start=17, budget=budget(48, 12)),
    "becomes full": decoding(logical_start=60, resident_start=31, budget=budget(num_sinks=4)),
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


def build(
    names: list[str], num_padding: int = 0, made: HeavyHitterMetadataBuilder | None = None
) -> HeavyHitterMetadata:
    """Metadata of a batch with one row for each name, and rows of padding without tokens."""
    plans = {name: PLANS[name] for name in sorted(names)}
    rows = [list(PLANS).index(name) for name in names] + [5] * num_padding
    lengths = [PLANS[name].num_new for name in names] + [0] * num_padding
    with publish(Step(ResidencyPlan(plans), lambda _: names)):
        common = common_metadata(lengths, TABLE[rows])
        return (made or copied()).build(0, common)


def copied(policy: str = "h2o") -> HeavyHitterMetadataBuilder:
    """A builder for kernels that copy K of a whole batch."""
    made = builder(SHAPE, policy)
    made.use(TorchKernels())
    return made


def in_place(policy: str = "h2o") -> HeavyHitterMetadataBuilder:
    """A builder for kernels that copy nothing, as a graph holds them."""
    made = builder(SHAPE, policy)
    made.use(SimpleNamespace(copies_kv=False))
    return made


def replace_prefix_caching(batching: Batching) -> Batching:
    """The same where requests share pages."""
    if isinstance(batching, CopiedBatches):
        return replace(batching, prefix_caching=True)
    return PersistentBatch(32, 16, torch.device("cpu"), prefix_caching=True)


def fields_of(batch: DecodeBatch) -> dict[str, list[int]]:
    """By name."""
    return {name: batch.field(name).tolist() for name in DECODE_FIELDS}


def test_prompts_one_by_one() -> None:
    """Each chunk has its tokens, its own pages first, its slots and what survives it."""
    first, last = build(list(PLANS)).prompts
    assert (first.tokens, first.block_table.tolist()[:2]) == (slice(0, 20), [5, 6])
    assert (first.resident_start, first.attended_len, first.logical_start, first.num_survivors) == (
        0,
        20,
        0,
        0,
    )
    assert (last.tokens, last.block_table.tolist()[:3]) == (slice(21, 26), [1, 7, 4])
    assert (last.resident_start, last.attended_len, last.logical_start, last.num_survivors) == (
        40,
        45,
        40,
        31,
    )
    assert (last.recent_start, last.num_sinks) == (35, 2)


FIELDS = {
    "token": [20, 26, 27],
    "attended_len": [32, 18, 32],
    "overwrites": [1, 0, 0],
    "selects": [1, 0, 1],
    "logical_start": [90, 17, 60],
    "recent_start": [91 - 12, 18 - 12, 61],
    "num_sinks": [3, 0, 4],
    "scores": [1, 1, 1],
    "split": [0, 0, 0],
}


@pytest.mark.parametrize("make", [in_place, copied], ids=["in place", "copied"])
def test_requests_with_one_new_token_share_a_batch(
    make: Callable[[], HeavyHitterMetadataBuilder],
) -> None:
    """Requests with one new token share one batch, in order of rows."""
    (batch,) = build(list(PLANS), made=make()).decodes
    # As many columns as the longest needs: next to prompts rows are copied.
    assert batch.block_table.tolist() == [[9, 3], [8, 2], [11, 10]]
    assert batch.first_block_ids.tolist() == [9, 8, 11]
    assert fields_of(batch) == FIELDS
    assert batch.fields.dtype == torch.int64


def test_what_fits_is_not_scored() -> None:
    """Its decoding query adds to no score, nor does any query of its prompt; others score."""
    plans = {
        "chunk": replace(LAST_CHUNK, num_survivors=0, budget=budget(64), fits=True),
        "token": decoding(logical_start=17, resident_start=17, budget=budget(64), fits=True),
        "other": decoding(logical_start=17, resident_start=17, budget=budget(64)),
    }
    with publish(Step(ResidencyPlan(plans), lambda _: list(plans))):
        metadata = in_place().build(0, common_metadata([5, 1, 1], TABLE[[2, 3, 4]]))
    assert metadata.decodes[0].field("scores").tolist() == [0, 1]
    (chunk,) = metadata.prompts
    assert (chunk.num_tokens, chunk.first_scoring_query) == (5, 5)


def test_one_token_of_a_prompt() -> None:
    """It is a decode that neither overwrites nor selects, so that a graph may hold it."""
    plan = replace(LAST_CHUNK, num_new=1)
    with publish(step := Step(ResidencyPlan({"a": plan}), lambda _: ["a"])):
        metadata = copied().build(0, common_metadata([1], TABLE[2:3]))
    fields = fields_of(metadata.decodes[0])
    assert (fields["attended_len"], fields["overwrites"], fields["selects"]) == ([41], [0], [0])
    assert metadata.prompts == [] and step.after.pack is not None


def test_padding_of_a_graph() -> None:
    """Rows after the batch's are written to their own token's output and attend to nothing."""
    made = in_place()
    build(["growing", "becomes full", "full"], made=made)
    (batch,) = build(["full"], num_padding=2, made=made).decodes
    assert batch.field("token").tolist() == [0, 1, 2]
    assert batch.field("attended_len").tolist() == [32, 0, 0]
    for name in DECODE_FIELDS[2:]:
        assert batch.field(name).tolist()[1:] == [0, 0]


@pytest.mark.parametrize("first", [0, 3, 12, 99])
def test_recent_window_grows_while_a_request_goes_on(first: int) -> None:
    """Fields that are moved on are those of a plan that is made anew."""
    own = replace(budget(32, 12, 2), first_recent=first)
    made = in_place()
    plan = decoding(logical_start=60, resident_start=32, prompt_end=58, budget=own)
    for step in range(20):
        with publish(Step(ResidencyPlan({"a": plan}), lambda _: ["a"])):
            (batch,) = made.build(0, common_metadata([1], TABLE[1:2])).decodes
        recent = min(12, first + 3 + step)
        assert batch.field("recent_start").tolist() == [60 + step + 1 - recent]
        assert plan.recent_start == 60 + step + 1 - recent
        plan.go_on()


def test_a_graphs_buffers_stay() -> None:
    """Each step's fields lie where the captured kernels read them; the table is vLLM's own."""
    made, names = in_place(), ["full", "growing"]
    addresses = {build(names, made=made).decodes[0].fields.data_ptr() for _ in range(3)}
    assert len(addresses) == 1
    table = TABLE[[1, 3]]
    plans = {name: PLANS[name] for name in names}
    with publish(Step(ResidencyPlan(plans), lambda _: names)):
        (batch,) = made.build(0, common_metadata([1, 1], table)).decodes
    assert batch.block_table.data_ptr() == table.data_ptr()
    with publish(WarmUp()):
        (batch,) = made.build(0, common_metadata([1, 1], table)).decodes
    assert batch.fields.data_ptr() in addresses and batch.field("attended_len").tolist() == [0, 0]


@pytest.mark.parametrize("make", [in_place, copied])
def test_where_pages_are_shared(make: Callable[..., HeavyHitterMetadataBuilder]) -> None:
    """Decoding begins at a request's own pages; survivors go after those of the prompt."""
    made = make("snapkv")
    made.batching = replace_prefix_caching(made.batching)
    plans = {
        "moves": replace(
            LAST_CHUNK,
            logical_start=29,
            num_new=3,
            prompt_end=32,
            resident_start=29,
            pack_block_idx=2,
        ),
        "moved": decoding(
            logical_start=60, resident_start=20, budget=budget(num_sinks=4), first_block_idx=2
        ),
    }
    tables = []
    for _ in range(2):
        with publish(Step(ResidencyPlan(plans), lambda _: list(plans))):
            metadata = made.build(0, common_metadata([3, 1], TABLE[[2, 0]]))
        tables.append(metadata.decodes[0].block_table)
        assert tables[-1][:, :2].tolist() == [[91, 92]]
        assert metadata.decodes[0].first_block_ids.tolist() == [91]
    assert (tables[0].data_ptr() == tables[1].data_ptr()) == (not made.kernels.copies_kv)
    (chunk,) = metadata.prompts
    assert chunk.destination_blocks is not None and chunk.destination_blocks.tolist() == [4, 95]
    assert chunk.first_window_query == 0 and metadata.asked == [[chunk]]
    assert chunk.window_scores is not None and chunk.window_scores.shape == (1, 2, 32)


def test_order_is_the_batchs() -> None:
    """Rows may come in any order, whatever the plan's."""
    metadata = build(["growing", "last chunk", "becomes full", "first chunk"])
    assert metadata.decodes[0].field("token").tolist() == [0, 6]
    assert metadata.decodes[0].first_block_ids.tolist() == [8, 11]
    assert [chunk.tokens for chunk in metadata.prompts] == [slice(1, 6), slice(7, 27)]
    assert [int(chunk.block_table[0]) for chunk in metadata.prompts] == [1, 5]


def test_packing_waits_for_the_forward_pass() -> None:
    """Survivors of ending prompts are packed in every layer, once, after the step."""
    step = Step(ResidencyPlan(PLANS), lambda _: list(PLANS))
    made, packed = in_place(), []
    made.kernels.pack_survivors = lambda *args: packed.append(args)
    layers = made.layers.context
    made.layers = replace(made.layers, names=["one", "two"])
    for name in made.layers.names:
        impl = SimpleNamespace(cache_of=lambda kv_cache: LayerCache.of(kv_cache, SHAPE.head_size))
        layers[name] = SimpleNamespace(kv_cache=empty_cache(SHAPE, 3), impl=impl)
    lengths = [plan.num_new for plan in PLANS.values()]
    with publish(step):
        made.build(0, common_metadata(lengths, TABLE[:5]))
    assert packed == []
    step.after.run()
    ((caches, chunks, scoring),) = packed
    assert [cache.key.data_ptr() for cache in caches] == [
        layers[name].kv_cache.data_ptr() for name in made.layers.names
    ]
    assert [(chunk.attended_len, chunk.num_survivors) for chunk in chunks] == [(45, 31)]
    assert scoring == made.scoring


def test_only_prompts_or_only_decodes() -> None:
    """Without requests past their prompt there is no decode batch, and the reverse."""
    assert build(["last chunk"]).decodes == []
    assert build(["full"]).prompts == []


def test_padding_is_no_request() -> None:
    """Rows without tokens after the batch's add nothing where K is copied."""
    (batch,) = build(["full"], num_padding=3).decodes
    assert batch.block_table.tolist() == [[9, 3]]


def test_a_page_more_at_its_first_slot() -> None:
    """A page belongs to the batch from the step in which its first slot is taken."""
    for resident, pages in ((15, [5]), (16, [5, 6]), (31, [5, 6]), (32, [5, 6, 91])):
        plan = decoding(logical_start=resident, resident_start=resident, budget=budget(48, 12))
        with publish(Step(ResidencyPlan({"a": plan}), lambda _: ["a"])):
            (batch,) = copied().build(0, common_metadata([1], TABLE[:1])).decodes
        assert batch.block_table.tolist() == [pages]


@pytest.mark.parametrize(("resident", "selects"), [(46, False), (47, True), (48, True)])
def test_selection_starts_when_full(resident: int, selects: bool) -> None:
    """A victim is chosen from the step on that takes the last slot; before it, none is."""
    plan = decoding(logical_start=resident, resident_start=resident, budget=budget(48, 12))
    with publish(Step(ResidencyPlan({"a": plan}), lambda _: ["a"])):
        (batch,) = copied().build(0, common_metadata([1], TABLE[:1])).decodes
    assert batch.field("selects").tolist() == [selects]
    assert batch.field("overwrites").tolist() == [resident == 48]


def test_no_step_is_empty() -> None:
    """Warm-up, profiling and capture get metadata with which nothing is read or written."""
    with publish(WarmUp()):
        metadata = copied().build(0, common_metadata([3, 1], TABLE[:2]))
    assert metadata.decodes == [] and metadata.prompts == []


@pytest.mark.parametrize("make", [on_triton, lambda _: TorchKernels()], ids=["triton", "torch"])
def test_a_warm_up_leaves_zeros(make: Callable[[Shape], Kernels]) -> None:
    """What memory held before may be no number, and a sampler or a router would read it."""
    layer = Layer(SHAPE, "h2o", 4, kernels=make(SHAPE))
    before = layer.kv_cache.clone()
    for lengths in ([2, 2], [1, 1]):
        with publish(WarmUp()):
            metadata = layer.builder.build(0, common_metadata(lengths, TABLE[: len(lengths)]))
        query, key, value = (torch.ones(sum(lengths), 2, 64) for _ in range(3))
        for built in (metadata, None):
            output = torch.full_like(query, torch.nan)
            layer.impl.forward(layer, query, key, value, layer.kv_cache, built, output)
            assert not output.any()
    assert torch.equal(layer.kv_cache.view(torch.uint8), before.view(torch.uint8))


def test_neither_step_nor_warm_up_is_refused() -> None:
    """A real step whose plan got lost on the way must not pass for a warm-up."""
    with pytest.raises(IntegrityError, match="outside execute_model"):
        copied().build(0, common_metadata([3, 1], TABLE[:2]))


def test_a_long_request_pads_no_short_one() -> None:
    """Batches are of about one length, and no larger than a call may copy."""
    lengths = [1, 9, 1, 70, 2, 64]  # pages
    plans = {
        str(i): decoding(
            logical_start=16 * n - 1, resident_start=16 * n - 1, budget=budget(2048, 12)
        )
        for i, n in enumerate(lengths)
    }
    table = torch.arange(6 * 80, dtype=torch.int32).view(6, 80)
    step = Step(ResidencyPlan(plans), lambda _: list(plans))
    few = copied()
    few.batching = replace(few.batching, page_elements=MAX_BATCH_ELEMENTS // 8)
    for made, tokens in ((copied(), [[0, 2], [1], [3, 5], [4]]), (few, None)):
        with publish(step):
            batches = made.build(0, common_metadata([1] * 6, table)).decodes
        found = [batch.field("token").tolist() for batch in batches]
        assert found == (tokens or [[0, 2], [1], [3], [4], [5]])
        for batch in batches:
            rows = batch.field("token").tolist()
            assert batch.block_table.shape[1] == max(lengths[i] for i in rows)


def test_another_batch_is_refused() -> None:
    """A batch that was not planned becomes no tensors."""
    step = Step(ResidencyPlan({"full": PLANS["full"]}), lambda _: ["full"])
    with publish(step), pytest.raises(IntegrityError, match="the plan is for"):
        copied().build(0, common_metadata([2], TABLE[1:2]))


def test_another_worker_is_refused() -> None:
    """A worker that publishes no steps is refused at the start, not at the first request."""
    config = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls="somebody.Worker"))
    spec = builder(SHAPE, "h2o").kv_cache_spec
    with pytest.raises(IntegrityError, match=f"runs in somebody.Worker, not in {WORKER}"):
        HeavyHitterMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))
