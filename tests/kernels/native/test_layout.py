# SPDX-License-Identifier: Apache-2.0
"""Structs are the same in Python and C++, and are checked before the native kernels read them."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from tests.kernels.harness import Shape
from tests.kernels.native.cases import Pool, decode_batch, prompt_chunk
from vllm_h2o.kernels.batch import DECODE_FIELDS, Scoring
from vllm_h2o.kernels.native import layout, loader
from vllm_h2o.policy import Term

NAMES = [entry[0] for entry in layout.expected()]
POOL = Pool(Shape(num_kv_heads=2, group=2, head_size=64, block_size=16), [20])


@pytest.mark.parametrize("variant", loader.available())
def test_same_in_a_library(variant: str) -> None:
    """Each library was built with the structs, fields and constants that are here."""
    assert layout.mismatch(ctypes.CDLL(str(loader.library_path(variant)))) is None


def test_everything_is_compared() -> None:
    """All structs with all their fields, the fields of a batch in order, and the limits."""
    assert {"H2oCache", "H2oTensors", "H2oScoring", "H2oTerm", "H2oBatch"} < {*NAMES}
    assert {"H2oChunk", "H2oPacked", "H2oRuntime"} < {*NAMES}
    for each in layout.STRUCTS:
        assert {f"{each.__name__}.{field[0]}" for field in each._fields_} < {*NAMES}
    rows = {f"k{name.title().replace('_', '')}": i for i, name in enumerate(DECODE_FIELDS)}
    assert rows.items() < layout.CONSTANTS.items()
    assert {"kAttendedLen", "kNumDecodeFields", "kHeadMultiple", "kLargestHead"} < {*NAMES}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", ["name", "value", "size", "missing"])
def test_layout_mismatch_is_named(name: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A struct, field or constant that differs in anything is named."""
    theirs = list(layout.expected())
    index = NAMES.index(name)
    _, value, size = theirs[index]
    if part == "missing":
        del theirs[index]
    else:
        changed = {"name": ("x", value, size), "value": (name, value + 8, size)}
        theirs[index] = changed.get(part, (name, value, size + 4))
    monkeypatch.setattr(layout, "exported", lambda library: iter(theirs))
    assert layout.mismatch(ctypes.CDLL(None)) == name


def test_a_library_with_more_or_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A struct that only the library has is named; a library without a list has none."""
    assert layout.mismatch(ctypes.CDLL(None)) == "H2oCache"
    more = [*layout.expected(), ("H2oMore", 0, 8)]
    monkeypatch.setattr(layout, "exported", lambda library: iter(more))
    assert layout.mismatch(ctypes.CDLL(None)) == "H2oMore"


@pytest.mark.parametrize("each", layout.STRUCTS, ids=lambda each: each.__name__)
def test_packed_bytes_are_the_struct(each: type[ctypes.Structure]) -> None:
    """The packed bytes are the struct, field by field, to its last byte."""
    numbers = [float(i) if field[1] is ctypes.c_float else i for i, field in fields(each)]
    packed = layout.packer(each).pack(*numbers)
    assert len(packed) == ctypes.sizeof(each)
    read = each.from_buffer_copy(packed)
    assert [getattr(read, field[0]) for _, field in fields(each)] == numbers


def fields(each: type[ctypes.Structure]) -> list[tuple[int, tuple]]:
    """A struct's fields, numbered from 1."""
    return list(enumerate(each._fields_, 1))


def test_packed_values_are_in_their_fields() -> None:
    """Each value is in the field of its name."""
    rest = {"num_survivors": 5, "recent_start": 7, "num_sinks": 2, "first_scoring_query": 3}
    chunk = prompt_chunk(POOL.block_table[0], slice(4, 14), 10, logical_start=40, **rest)
    read = layout.H2oChunk.from_buffer_copy(layout.chunk_bytes(chunk))
    assert (read.token_start, read.num_tokens, read.resident_start) == (4, 10, 10)
    assert (read.logical_start, read.first_scoring_query, read.window_scores) == (40, 3, None)
    window = torch.zeros(2, 20)
    asked = layout.H2oChunk.from_buffer_copy(layout.chunk_bytes(chunk, 6, window))
    assert (asked.first_scoring_query, asked.window_scores) == (6, window.data_ptr())
    packed = layout.H2oPacked.from_buffer_copy(layout.packed_bytes(chunk))
    assert (packed.attended_len, packed.num_survivors, packed.logical_end) == (20, 5, 50)
    assert (packed.recent_start, packed.num_sinks) == (7, 2)
    assert read.block_table == packed.block_table == POOL.block_table.data_ptr()
    cache = layout.H2oCache.from_buffer_copy(layout.cache_bytes(POOL.cache))
    assert (cache.base, cache.num_kv_heads) == (POOL.kv_cache.data_ptr(), 2)
    assert (cache.block_size, cache.head_size, cache.type) == (16, 64, 0)
    scoring = Scoring(power=2, by_age=True, merge=0.5)
    rank = layout.H2oScoring.from_buffer_copy(layout.scoring_bytes(scoring))
    assert (rank.power, rank.by_page, rank.by_age, rank.merge) == (2, 0, 1, 0.5)
    window_term = Term("window", "max", power=2, weight=0.25, reach=12, skip=16)
    term = layout.H2oTerm.from_buffer_copy(layout.term_bytes(window_term, by_age=True))
    assert (term.power, term.by_maximum, term.reach, term.skip) == (2, 1, 12, 16)
    assert (term.sees_later, term.by_age, term.weight) == (0, 1, 0.25)
    term = layout.H2oTerm.from_buffer_copy(layout.term_bytes(Term("rotated"), by_age=False))
    assert (term.power, term.by_maximum, term.sees_later, term.by_age) == (1, 0, 1, 0)
    batch = decode_batch(POOL.block_table, token=[8])
    read = layout.H2oBatch.from_buffer_copy(layout.batch_bytes(batch))
    assert (read.num_requests, read.field_stride, read.request_stride) == (1, 1, 1)
    assert (read.fields, read.table_stride) == (batch.fields.data_ptr(), POOL.block_table.shape[1])
    tensors = POOL.tensors(3)
    step = layout.H2oTensors.from_buffer_copy(layout.tensors_bytes(POOL.cache, tensors))
    for name in ("query", "key", "value", "out"):
        tensor = getattr(tensors, name)
        assert getattr(step, name) == tensor.data_ptr()
        assert getattr(step, f"{name}_stride") == tensor.stride(0)
    assert (step.num_heads, step.out_type, step.scale) == (4, 0, 0.125)
    alone = layout.H2oTensors.from_buffer_copy(layout.query_bytes(POOL.cache, tensors))
    assert (alone.query, alone.query_stride, alone.key) == (step.query, step.query_stride, None)
    assert (alone.num_heads, alone.scale) == (4, 0.125)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": torch.zeros(1, 4, 128)[:, :, ::2]}, r"heads of 64 are not contiguous"),
        ({"key": torch.zeros(1, 2, 64).half()}, r"torch.float16 .* with a cache of torch.float32"),
        ({"out": torch.zeros(1, 4, 64).half()}, r"outputs of torch.float16 with a cache of"),
    ],
)
def test_tensors_are_checked(changed: dict[str, torch.Tensor], message: str) -> None:
    """Tensors that would be misread are refused."""
    with pytest.raises(ValueError, match=message):
        layout.tensors_bytes(POOL.cache, replace(POOL.tensors(1), **changed))


def test_queries_are_checked() -> None:
    """A term takes queries of the cache's type."""
    for query, message in (
        (torch.zeros(1, 4, 64).half(), "queries of torch.float16 with a cache of torch.float32"),
        (torch.zeros(1, 4, 128)[:, :, ::2], "not contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            layout.query_bytes(POOL.cache, replace(POOL.tensors(1), query=query))


def test_pages_are_checked() -> None:
    """Views of something else than pages, and sizes that no kernel has, are refused."""
    with pytest.raises(ValueError, match="not of pages of 16 slots"):
        layout.cache_bytes(replace(POOL.cache, value=POOL.cache.value.clone()))
    for head_size, message in (
        (40, "40 is not a multiple of 16"),
        (1040, "1040 is more than 1024"),
    ):
        with pytest.raises(ValueError, match=f"a head size of {message}"):
            layout.cache_bytes(Pool(Shape(head_size=head_size), [20]).cache)
    with pytest.raises(ValueError, match="the cache holds torch.int32"):
        layout.cache_bytes(replace(POOL.cache, key=POOL.cache.key.view(torch.int32)))


def test_the_rest_is_checked() -> None:
    """Tables, fields and window scores that would be misread are refused."""
    table = torch.zeros(2, dtype=torch.int64)
    for described in (layout.chunk_bytes, layout.packed_bytes):
        with pytest.raises(ValueError, match="a block table of torch.int64"):
            described(prompt_chunk(table, slice(0, 1), 0))
    with pytest.raises(ValueError, match="with strides"):
        layout.batch_bytes(decode_batch(torch.zeros(3, 2, dtype=torch.int32).T))
    with pytest.raises(ValueError, match="fields of torch.int32"):
        batch = decode_batch(POOL.block_table)
        layout.batch_bytes(replace(batch, fields=batch.fields.int()))
    chunk = prompt_chunk(POOL.block_table[0], slice(0, 10), 10)
    for scores in (torch.zeros(2, 20).double(), torch.zeros(2, 21), torch.zeros(20, 2).T):
        with pytest.raises(ValueError, match=r"window scores are .* not \(2, 20\)"):
            layout.chunk_bytes(chunk, 0, scores)
