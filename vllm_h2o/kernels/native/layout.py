"""What the C++ kernels are handed: structs, constants, and tensors as addresses.

The structs are those of layout.h. A library tells what it was built with, and :func:`mismatch`
compares that with what is here.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from itertools import zip_longest

import torch

from vllm_h2o.kernels.batch import DECODE_FIELDS, DecodeBatch, PromptChunk, Scoring, StepTensors
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.sinks import SinkLogits

HEAD_MULTIPLE = 16
"""What head sizes are whole multiples of."""
LARGEST_HEAD = 1024
TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}


class H2oCache(ctypes.Structure):
    """One layer's pages."""

    _fields_ = (
        ("base", c_void_p),
        ("first_rows", c_void_p),
        ("row_bytes", c_int64),
        ("num_kv_heads", c_int32),
        ("rows_per_block", c_int32),
        ("first_head", c_int32),
        ("shared_tenths", c_int32),
        ("block_size", c_int32),
        ("head_size", c_int32),
        ("type", c_int32),
        ("has_mass", c_int32),
        ("keeps_scores", c_int32),
        ("key_factor", c_float),
        ("value_factor", c_float),
    )


class H2oTensors(ctypes.Structure):
    """A step's tensors; strides are in elements, from token to token."""

    _fields_ = (
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("out", c_void_p),
        ("initial_score", c_void_p),
        ("sink_logits", c_void_p),
        ("query_stride", c_int64),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
        ("out_stride", c_int64),
        ("num_heads", c_int32),
        ("type", c_int32),
        ("out_type", c_int32),
        ("scale", c_float),
        ("out_scale", c_float),
    )


class H2oScoring(ctypes.Structure):
    """What is added to scores, and what is ranked."""

    _fields_ = (
        ("power", c_int32),
        ("skip_recent", c_int32),
        ("by_page", c_int32),
        ("by_age", c_int32),
        ("by_maximum", c_int32),
        ("reach", c_int32),
        ("merge", c_float),
    )


class H2oBatch(ctypes.Structure):
    """B requests with one new token each."""

    _fields_ = (
        ("block_table", c_void_p),
        ("fields", c_void_p),
        ("table_stride", c_int64),
        ("field_stride", c_int64),
        ("request_stride", c_int64),
        ("num_requests", c_int32),
    )


class H2oChunk(ctypes.Structure):
    """T tokens of one prompt."""

    _fields_ = (
        ("block_table", c_void_p),
        ("token_start", c_int64),
        ("num_tokens", c_int64),
        ("resident_start", c_int64),
        ("logical_start", c_int64),
        ("first_scoring_query", c_int64),
        ("first_scored_slot", c_int64),
    )


class H2oPacked(ctypes.Structure):
    """A request of which some tokens survive its prompt."""

    _fields_ = (
        ("block_table", c_void_p),
        ("attended_len", c_int64),
        ("num_survivors", c_int64),
        ("recent_start", c_int64),
        ("num_sinks", c_int64),
        ("logical_end", c_int64),
        ("splits", c_int64),
    )


class H2oRuntime(ctypes.Structure):
    """Functions of an OpenMP runtime."""

    _fields_ = (
        ("parallel", c_void_p),
        ("barrier", c_void_p),
        ("max_threads", c_void_p),
        ("thread", c_void_p),
        ("num_threads", c_void_p),
    )


STRUCTS = (H2oCache, H2oTensors, H2oScoring, H2oBatch, H2oChunk, H2oPacked, H2oRuntime)
CONSTANTS = {
    "kFloat": TYPES[torch.float32],
    "kBf16": TYPES[torch.bfloat16],
    "kHalf": TYPES[torch.float16],
    "kE4m3": TYPES[torch.float8_e4m3fn],
    "kE5m2": TYPES[torch.float8_e5m2],
    "kHeadMultiple": HEAD_MULTIPLE,
    "kLargestHead": LARGEST_HEAD,
    **{f"k{name.title().replace('_', '')}": row for row, name in enumerate(DECODE_FIELDS)},
    "kNumDecodeFields": len(DECODE_FIELDS),
}
"""What C++ calls the numbers that both sides know; the fields of a batch are rows."""

_CODES = {c_void_p: "P", c_int64: "q", c_int32: "i", c_float: "f"}


def packer(layout: type[ctypes.Structure]) -> struct.Struct:
    """What packs a struct's fields, in order, in less than half the time of a ``Structure``."""
    codes = "".join(_CODES[field[1]] for field in layout._fields_)
    padding = ctypes.sizeof(layout) - struct.calcsize(f"@{codes}")
    return struct.Struct(f"@{codes}{padding}x")


_CACHE, _TENSORS, _SCORING, _BATCH, _CHUNK, _PACKED, RUNTIME = map(packer, STRUCTS)

Entry = tuple[str, int, int]
"""A struct, 0 and its size; "struct.field", its offset and size; or a constant, its value and 0."""


class _Entry(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("value", c_int64), ("size", c_int64))


def expected() -> Iterator[Entry]:
    """What a library should have been built with."""
    for layout in STRUCTS:
        yield layout.__name__, 0, ctypes.sizeof(layout)
        for field in layout._fields_:
            place = getattr(layout, field[0])
            yield f"{layout.__name__}.{field[0]}", place.offset, place.size
    for name, value in CONSTANTS.items():
        yield name, value, 0


def exported(library: ctypes.CDLL) -> Iterator[Entry]:
    """What a library was built with; nothing of one that cannot tell."""
    if not hasattr(library, "h2o_layout_entries"):
        return
    library.h2o_layout_entries.restype = ctypes.POINTER(_Entry)
    for entry in library.h2o_layout_entries():
        if entry.name is None:
            return
        yield entry.name.decode(), entry.value, entry.size


def mismatch(library: ctypes.CDLL) -> str | None:
    """The name of the first struct, field or constant that a library has otherwise."""
    for ours, theirs in zip_longest(expected(), exported(library)):
        if ours != theirs:
            return str((ours or theirs)[0])
    return None


def cache_bytes(cache: LayerCache) -> bytes:
    """A layer's pages.

    Raises:
        ValueError: when the views are not those of :meth:`LayerCache.of`, or are nothing that the
            kernels compute.

    """
    key = cache.key
    _, block_size, head_size = key.shape
    row, column, inner = key.stride()
    size = key.itemsize
    base, split = key.data_ptr(), block_size * head_size * size
    words = (cache.score, cache.position, cache.mass, cache.score_without_window)
    own = [view.data_ptr() for view in words if view is not None]
    views = (cache.value.data_ptr(), *own)
    expected_words = (base + 2 * split + 4 * block_size * i for i in range(len(own)))
    if (
        views != (base + split, *expected_words)
        or (column, inner) != (head_size, 1)
        or row * size % 4
    ):
        raise ValueError(
            f"the views are not of pages of {block_size} slots: strides {key.stride()}"
        )
    if head_size % HEAD_MULTIPLE:
        raise ValueError(f"a head size of {head_size} is not a multiple of {HEAD_MULTIPLE}")
    if head_size > LARGEST_HEAD:
        raise ValueError(f"a head size of {head_size} is more than {LARGEST_HEAD}")
    if key.dtype not in TYPES:
        raise ValueError(f"the cache holds {key.dtype}, not one of {list(TYPES)}")
    first_rows = cache.first_rows
    heads = (cache.num_kv_heads, cache.rows_per_block, cache.first_head, cache.shared_tenths)
    shared = 0 if first_rows is None else first_rows.data_ptr()
    more = (cache.mass is not None, cache.score_without_window is not None)
    sizes = (*heads, block_size, head_size, TYPES[key.dtype], *more)
    factors = [1.0 / scale for scale in cache.scales]
    return _CACHE.pack(base, shared, row * size, *sizes, *factors)


def tensors_bytes(cache: LayerCache, tensors: StepTensors) -> bytes:
    """A step's tensors.

    Raises:
        ValueError: when a head is not contiguous, or a type is not the cache's.

    """
    query, key, value, out = tensors.query, tensors.key, tensors.value, tensors.out
    dtype, out_dtype = _computed(cache, query), out.dtype
    strides = _token_strides(cache, (query, key, value, out))
    if query.dtype is not dtype or key.dtype is not dtype or value.dtype is not dtype:
        raise ValueError(f"{query.dtype}, {key.dtype} and {value.dtype} with a cache of {dtype}")
    if out_dtype is not dtype and out_dtype is not torch.float32:
        raise ValueError(f"outputs of {out_dtype} with a cache of {dtype}")
    initial = tensors.initial_score
    if initial is not None and not (initial.is_contiguous() and initial.dtype is torch.float32):
        raise ValueError(f"initial scores are {initial.dtype} with strides {initial.stride()}")
    return _TENSORS.pack(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        out.data_ptr(),
        0 if initial is None else initial.data_ptr(),
        _sinks(tensors.sink_logits, query),
        *strides,
        query.shape[1],
        TYPES[dtype],
        TYPES[out_dtype],
        tensors.scale * cache.scales[0],
        cache.scales[1],
    )


def query_bytes(
    cache: LayerCache, query: torch.Tensor, scale: float, sink_logits: SinkLogits = None
) -> bytes:
    """Queries alone, as :func:`tensors_bytes` with nothing else."""
    (stride,) = _token_strides(cache, (query,))
    dtype = _computed(cache, query)
    if query.dtype is not dtype:
        raise ValueError(f"queries of {query.dtype} with a cache of {cache.key.dtype}")
    sizes = (stride, 0, 0, 0, query.shape[1], TYPES[dtype], 0, scale * cache.scales[0], 1.0)
    return _TENSORS.pack(query.data_ptr(), 0, 0, 0, 0, _sinks(sink_logits, query), *sizes)


def _sinks(sink_logits: SinkLogits, query: torch.Tensor) -> int:
    """Address of the logits of attention sinks, checked: one for each query head."""
    if sink_logits is None:
        return 0
    shape, is_plain = (query.shape[1],), sink_logits.is_contiguous()
    if sink_logits.dtype is not torch.float32 or sink_logits.shape != shape or not is_plain:
        found = f"{sink_logits.dtype} {tuple(sink_logits.shape)}"
        raise ValueError(f"sinks are {found} with strides {sink_logits.stride()}, not {shape}")
    return sink_logits.data_ptr()


def _computed(cache: LayerCache, query: torch.Tensor) -> torch.dtype:
    """The type of queries and of new K and V: the cache's, or what float8 is made of."""
    if not cache.is_quantised:
        return cache.key.dtype
    if query.dtype not in TYPES or query.element_size() == 1:
        raise ValueError(f"queries of {query.dtype} with a cache of {cache.key.dtype}")
    return query.dtype


def _token_strides(cache: LayerCache, tensors: tuple[torch.Tensor, ...]) -> list[int]:
    """Elements from token to token of tensors [T, heads, D], whose heads must be contiguous."""
    head_size, strides = cache.key.shape[2], []
    for tensor in tensors:
        token, head, inner = tensor.stride()
        if head != head_size or inner != 1:
            raise ValueError(f"heads of {head_size} are not contiguous: strides {tensor.stride()}")
        strides.append(token)
    return strides


def scoring_bytes(scoring: Scoring) -> bytes:
    """What is added to scores, and what is ranked."""
    if scoring.power not in (0, 1, 2):
        raise ValueError(f"scores are sums of powers 0, 1 or 2, not {scoring.power}")
    return _SCORING.pack(
        scoring.power,
        scoring.skip_recent,
        scoring.by_page,
        scoring.by_age,
        scoring.by_maximum,
        scoring.reach,
        scoring.merge,
    )


def batch_bytes(batch: DecodeBatch) -> bytes:
    """Requests with one new token each."""
    table, fields = batch.block_table, batch.fields
    if fields.dtype != torch.int64:
        raise ValueError(f"fields of {fields.dtype}")
    return _BATCH.pack(
        _address(table), fields.data_ptr(), table.stride(0), *fields.stride(), fields.shape[1]
    )


def chunk_bytes(chunk: PromptChunk, first_query: int | None = None) -> bytes:
    """A chunk that is attended to, or scored: by queries from ``first_query`` on, if given."""
    return _CHUNK.pack(
        _address(chunk.block_table),
        chunk.tokens.start,
        chunk.num_tokens,
        chunk.resident_start,
        chunk.logical_start,
        chunk.first_scoring_query if first_query is None else first_query,
        chunk.first_scored_slot,
    )


def packed_bytes(chunk: PromptChunk) -> bytes:
    """A chunk whose survivors are packed."""
    return _PACKED.pack(
        _address(chunk.block_table),
        chunk.attended_len,
        chunk.num_survivors,
        chunk.recent_start,
        chunk.num_sinks,
        chunk.logical_end,
        chunk.splits,
    )


def _address(block_table: torch.Tensor) -> int:
    """Of a block table, checked: int32, entries of a row contiguous."""
    if block_table.dtype != torch.int32 or block_table.stride(-1) != 1:
        stride = block_table.stride()
        raise ValueError(f"a block table of {block_table.dtype} with strides {stride}")
    return block_table.data_ptr()
