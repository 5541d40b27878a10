# SPDX-License-Identifier: Apache-2.0
"""A long request beside short ones is divided by its own length, in a grid that knows none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.kernels.caches import copied, filled, on_triton, same
from tests.kernels.harness import Shape
from vllm_h2o.kernels.batch import DECODE_FIELDS, DecodeBatch, Scoring, StepTensors
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.kernels.triton import decode, merge, score
from vllm_h2o.kernels.triton.kernels import TritonKernels
from vllm_h2o.kernels.triton.sizes import MAX_KV_SPLITS, num_spare, splits_of
from vllm_h2o.kernels.triton.strips import program_of, split_of

SHAPE = Shape(num_kv_heads=2, group=2, head_size=16, block_size=8)
LONG_BESIDE_SHORT = [5, 8, 1, 300, 0, 9, 17, 3]
LENGTHS = st.lists(st.integers(0, 24) | st.integers(100, 300), min_size=1, max_size=8)


@triton.jit
def places(
    fields_ptr, found_ptr, field_stride, request_stride, num_requests, num_kv_splits, num_spare,
    most: tl.constexpr, slots: tl.constexpr,
):  # fmt: skip
    """What a program finds of itself, and its own index by that; [programs, 5]."""
    program = tl.program_id(0)
    b, s, num_splits, first = split_of(
        fields_ptr, field_stride, request_stride, num_requests, num_kv_splits, num_spare, program,
        most, slots,
    )  # fmt: skip
    found = found_ptr + program * 5
    tl.store(found, b)
    tl.store(found + 1, s)
    tl.store(found + 2, num_splits)
    tl.store(found + 3, first)
    tl.store(found + 4, program_of(b, s, first, num_kv_splits, num_spare))


def fields_of(lengths: list[int]) -> torch.Tensor:
    """Fields of which only lengths matter, request by request."""
    fields = torch.zeros(len(lengths), len(DECODE_FIELDS), dtype=torch.int64)
    fields[:, DECODE_FIELDS.index("attended_len")] = torch.tensor(lengths)
    return fields.T


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.integers(0, 40) | st.integers(0, 9000), min_size=1, max_size=9),
    st.sampled_from([(1, 5), (2, 9), (1, 33), (3, 0)]),
)
@example([24576, *[1024] * 65], (1, 33))
@example([1024] * 300 + [9000], (1, 5))
@example([0, 0, 9000, 9000], (2, 9))
def test_programs_are_the_splits_of_the_definition(
    lengths: list[int], programs_each_spare: tuple[int, int]
) -> None:
    """Each split has one program; what is left of the spare ones has no request."""
    fields, (each, spare) = fields_of(lengths), programs_each_spare
    programs = spare + len(lengths) * each
    found = torch.zeros(programs, 5, dtype=torch.int32)
    places[programs,](
        fields, found, *fields.stride(), len(lengths), each, spare,
        most=MAX_KV_SPLITS, slots=1024,
    )  # fmt: skip
    splits = splits_of(lengths, each, spare)
    assert sum(splits) <= programs
    busy = found[found[:, 0] < len(lengths)].tolist()
    assert sorted((b, s) for b, s, *_ in busy) == [
        (b, s) for b, num in enumerate(splits) for s in range(num)
    ]
    for program, (b, _, num, _, own) in enumerate(found.tolist()):
        assert b == len(lengths) or (num, own) == (splits[b], program)


def test_requests_of_one_length_have_the_same_splits() -> None:
    """Spare programs are for those that are longer than others: waves stay whole."""
    for at_once in (116, 324, 528):
        for heads in (1, 2, 8, 32):
            for batch in range(1, 3 * at_once // heads):
                each = max(1, at_once // (batch * heads))
                spare = num_spare(at_once, heads, min(each, MAX_KV_SPLITS), 1 << 17)
                for length in (1000, 4096, 1 << 17):
                    splits = splits_of([length] * batch, min(each, MAX_KV_SPLITS), spare)
                    assert set(splits) == {min(each, MAX_KV_SPLITS)}


def test_spare_programs_where_none_can_be_long() -> None:
    """None where the block table has no room for a long request, or all have the most splits."""
    assert num_spare(528, 8, 1, 1024) == 0
    assert num_spare(528, 8, 1, 1040) == 33
    assert num_spare(528, 8, MAX_KV_SPLITS, 1 << 17) == 0


def mixed_batch(lengths: list[int], shares: bool) -> tuple[DecodeBatch, int]:
    """Requests of these lengths, some of which overwrite and select; of a table of one width."""
    size, owned, tables, fields = SHAPE.block_size, 0, [], []
    for token, attended in enumerate(lengths):
        is_shared = shares and attended > size and token % 2 == 1
        attended = -(-attended // size) * size if is_shared else attended
        num_pages = -(-attended // size)
        tables.append([*range(owned, owned + num_pages), *[0] * (38 - num_pages)])
        owned += num_pages
        values = {
            "token": token,
            "attended_len": attended,
            "overwrites": is_shared or (attended > 0 and token % 3 == 0),
            "selects": attended > 4,
            "logical_start": 1000,
            "recent_start": 990,
            "num_sinks": 1,
            "scores": token % 5 != 4,
            "split": is_shared,
        }
        fields.append([int(values[name]) for name in DECODE_FIELDS])
    return DecodeBatch(torch.tensor(tables, dtype=torch.int32), torch.tensor(fields).T), owned


class Grids:
    """A kernel whose grids are kept."""

    def __init__(self, kernel: Any, seen: list[Any]) -> None:
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid: Any) -> Any:
        """Launch it."""
        self.seen.append(grid)
        return self.kernel[grid]


def small_splits(patch: pytest.MonkeyPatch, processors: int) -> list[Any]:
    """Splits of 16 slots, as many at once as on so many multiprocessors; the grids of launches."""
    grids: list[Any] = []
    patch.setattr("vllm_h2o.kernels.triton.kernels.PROCESSORS", processors)
    patch.setattr("vllm_h2o.kernels.triton.sizes.TILE", 16)
    for name in ("PAGE_LANES", "SPLIT_SLOTS"):
        for module in ("kernels", "sizes"):
            patch.setattr(f"vllm_h2o.kernels.triton.{module}.{name}", 16)
    for module, name in (
        (decode, "attend_split"),
        (merge, "nearest_key"),
        (score, "merge_and_score"),
    ):
        patch.setattr(module, name, Grids(getattr(module, name), grids))
    return grids


def compare(kernels: TritonKernels, lengths: list[int], scoring: Scoring, shares: bool) -> None:
    """One step of a batch by these kernels and by torch's; no arrival is left over."""
    batch, owned = mixed_batch(lengths, shares)
    draw = torch.Generator().manual_seed(sum(lengths))
    theirs = filled(SHAPE, owned + 1, 2, splits=shares, merges=scoring.merge > 0)
    theirs.score.copy_(torch.rand(theirs.score.shape, generator=draw))
    lens, num_heads = batch.field("attended_len"), SHAPE.num_kv_heads
    victims = torch.zeros(owned + 1, num_heads, dtype=torch.int32)
    for b in batch.field("split").nonzero().flatten().tolist():
        assert theirs.first_rows is not None
        pages = int(lens[b]) // SHAPE.block_size
        bounds = torch.tensor([0, max(1, pages // 3), num_heads * pages])
        theirs.first_rows[batch.first_block_ids[b]] = bounds.int()
    ours = copied(theirs, SHAPE)
    shape = (len(lengths), num_heads * SHAPE.group, SHAPE.head_size)
    query = torch.randn(shape, generator=draw)
    key, value = torch.randn(2, len(lengths), num_heads, SHAPE.head_size, generator=draw)
    real = lens > 0
    rows = DecodeBatch(batch.block_table[real], batch.fields[:, real])
    expected, out = torch.zeros(shape), torch.full(shape, 7.0)
    their_victims, our_victims = victims.clone(), victims.clone()
    if real.any():
        tensors = StepTensors(query, key, value, expected, 0.2)
        TorchKernels().decode(theirs, rows, their_victims, tensors, scoring)
    kernels.decode(ours, batch, our_victims, StepTensors(query, key, value, out, 0.2), scoring)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(our_victims, their_victims)
    same(ours, theirs, owned)
    assert not kernels._candidates[2].any()


@settings(max_examples=2, deadline=None)
@given(LENGTHS, st.sampled_from([1, 4, 9]), st.sampled_from([0.0, 0.15]), st.booleans())
@example(LONG_BESIDE_SHORT, 4, 0.0, False)
@example(LONG_BESIDE_SHORT, 4, 0.15, True)
def test_decode_of_mixed_lengths_equals_torch(
    lengths: list[int], processors: int, merge: float, shares: bool
) -> None:
    """Outputs, pages and victims, whichever requests have further splits."""
    with pytest.MonkeyPatch.context() as patch:
        small_splits(patch, processors)
        kernels = on_triton(SHAPE)
        assert isinstance(kernels, TritonKernels)
        compare(kernels, lengths, Scoring(power=1 + shares, merge=merge), shares)


def test_grid_does_not_depend_on_lengths() -> None:
    """A captured graph keeps it; a long request has programs of it that a short one leaves."""
    with pytest.MonkeyPatch.context() as patch:
        grids = small_splits(patch, 4)
        kernels = on_triton(SHAPE)
        assert isinstance(kernels, TritonKernels)
        seen = []
        for lengths in (LONG_BESIDE_SHORT, 8 * [4]):
            compare(kernels, lengths, Scoring(), False)
            seen.append(list(grids))
            grids.clear()
        assert seen[0] == seen[1] == 2 * [(2, 4 + 8)]
        assert splits_of(LONG_BESIDE_SHORT, 1, 4)[3] == 4
