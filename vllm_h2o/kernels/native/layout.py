# SPDX-License-Identifier: Apache-2.0
"""Structs, constants and tensors' addresses, as the C++ kernels take them.

The structs are those of layout.h. A library lists its own, and :func:`mismatch` compares the two.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from itertools import zip_longest

import torch

from vllm_h2o.kernels.batch import DECODE_FIELDS, DecodeBatch, PromptChunk, Scoring, StepTensors
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.sinks import SinkLogits
from vllm_h2o.policy import Term

HEAD_MULTIPLE = 16
"""Head sizes are multiples of this."""
LARGEST_HEAD = 1024
TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}

_CODES = {c_void_p: "P", c_int64: "q", c_int32: "i", c_float: "f"}


def _typed(
    pointers: str = "", words: str = "", ints: str = "", floats: str = ""
) -> tuple[tuple[str, type], ...]:
    """Name a struct's fields: they lie in this order."""
    names = dict(zip(_CODES, (pointers, words, ints, floats), strict=True))
    return tuple((name, kind) for kind, group in names.items() for name in group.split())


class H2oCache(ctypes.Structure):
    """One layer's pages."""

    _fields_ = _typed(
        pointers="base first_rows",
        words="row_bytes",
        ints="num_kv_heads rows_per_block first_head shared_tenths block_size head_size type "
        "has_mass keeps_scores",
        floats="key_factor value_factor",
    )


class H2oTensors(ctypes.Structure):
    """A step's tensors; strides are in elements, from token to token."""

    _fields_ = _typed(
        pointers="query key value out sink_logits",
        words="query_stride key_stride value_stride out_stride sink_stride",
        ints="num_heads type out_type",
        floats="scale out_scale",
    )


class H2oScoring(ctypes.Structure):
    """How the queries of decode steps score, and how tokens are ranked."""

    _fields_ = _typed(ints="power by_age by_page", floats="merge")


class H2oTerm(ctypes.Structure):
    """A term of the ranking that is added when a chunk of the prompt is stored."""

    _fields_ = _typed(ints="power by_maximum reach skip sees_later by_age", floats="weight")


class H2oBatch(ctypes.Structure):
    """B requests with one new token each."""

    _fields_ = _typed(
        pointers="block_table fields",
        words="table_stride field_stride request_stride",
        ints="num_requests",
    )


class H2oChunk(ctypes.Structure):
    """T tokens of one prompt."""

    _fields_ = _typed(
        pointers="block_table window_scores",
        words="token_start num_tokens resident_start logical_start first_scoring_query "
        "first_scored_slot",
    )


class H2oPacked(ctypes.Structure):
    """A request whose survivors are packed."""

    _fields_ = _typed(
        pointers="block_table",
        words="attended_len num_survivors recent_start num_sinks logical_end splits",
    )


class H2oRuntime(ctypes.Structure):
    """Functions of an OpenMP runtime."""

    _fields_ = _typed(pointers="parallel barrier max_threads thread num_threads")


STRUCTS = (H2oCache, H2oTensors, H2oScoring, H2oTerm, H2oBatch, H2oChunk, H2oPacked, H2oRuntime)
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
"""Numbers that both sides know, by their names in C++; the fields of a batch are rows."""


def packer(layout: type[ctypes.Structure]) -> struct.Struct:
    """Pack a struct's fields, in order, in less than half the time of a ``Structure``."""
    codes = "".join(_CODES[field[1]] for field in layout._fields_)
    padding = ctypes.sizeof(layout) - struct.calcsize(f"@{codes}")
    return struct.Struct(f"@{codes}{padding}x")


_CACHE, _TENSORS, _SCORING, _TERM, _BATCH, _CHUNK, _PACKED, RUNTIME = map(packer, STRUCTS)

Entry = tuple[str, int, int]
"""A struct, 0 and its size; "struct.field", its offset and size; or a constant, its value and 0."""


class _Entry(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("value", c_int64), ("size", c_int64))


def expected() -> Iterator[Entry]:
    """List what a library should have been built with."""
    for layout in STRUCTS:
        yield layout.__name__, 0, ctypes.sizeof(layout)
        for field in layout._fields_:
            place = getattr(layout, field[0])
            yield f"{layout.__name__}.{field[0]}", place.offset, place.size
    for name, value in CONSTANTS.items():
        yield name, value, 0


def exported(library: ctypes.CDLL) -> Iterator[Entry]:
    """List what a library was built with; nothing where it has no list."""
    if not hasattr(library, "h2o_layout_entries"):
        return
    library.h2o_layout_entries.restype = ctypes.POINTER(_Entry)
    for entry in library.h2o_layout_entries():
        if entry.name is None:
            return
        yield entry.name.decode(), entry.value, entry.size


def mismatch(library: ctypes.CDLL) -> str | None:
    """Name the first struct, field or constant that a library has otherwise."""
    for ours, theirs in zip_longest(expected(), exported(library)):
        if ours != theirs:
            return str((ours or theirs)[0])
    return None


def cache_bytes(cache: LayerCache) -> bytes:
    """Pack a layer's pages.

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
    """Pack a step's tensors.

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
    return _TENSORS.pack(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        out.data_ptr(),
        _sinks(tensors.sink_logits, query.shape[1:2]),
        *strides,
        0,
        query.shape[1],
        TYPES[dtype],
        TYPES[out_dtype],
        tensors.scale * cache.scales[0],
        cache.scales[1],
    )


def query_bytes(cache: LayerCache, tensors: StepTensors) -> bytes:
    """Pack a step's queries alone: K and V are stored."""
    query = tensors.query
    (stride,) = _token_strides(cache, (query,))
    dtype = _computed(cache, query)
    if query.dtype is not dtype:
        raise ValueError(f"queries of {query.dtype} with a cache of {cache.key.dtype}")
    sinks, num_heads = tensors.sink_logits, query.shape[1]
    of_each = sinks is not None and sinks.dim() == 2
    address = _sinks(sinks, query.shape[:2] if of_each else query.shape[1:2])
    scale = tensors.scale * cache.scales[0]
    strides = (stride, 0, 0, 0, num_heads if of_each else 0)
    sizes = (*strides, num_heads, TYPES[dtype], 0, scale, 1.0)
    return _TENSORS.pack(query.data_ptr(), 0, 0, 0, address, *sizes)


def _sinks(sink_logits: SinkLogits, shape: Sequence[int]) -> int:
    """Check the logits of attention sinks, of a shape; return their address."""
    if sink_logits is None:
        return 0
    is_plain = sink_logits.is_contiguous()
    if sink_logits.dtype is not torch.float32 or sink_logits.shape != shape or not is_plain:
        found = f"{sink_logits.dtype} {tuple(sink_logits.shape)}"
        strides = sink_logits.stride()
        raise ValueError(f"sinks are {found} with strides {strides}, not {tuple(shape)}")
    return sink_logits.data_ptr()


def _computed(cache: LayerCache, query: torch.Tensor) -> torch.dtype:
    """Return the type of queries and of new K and V: the cache's, or what float8 is made of."""
    if not cache.is_quantised:
        return cache.key.dtype
    if query.dtype not in TYPES or query.element_size() == 1:
        raise ValueError(f"queries of {query.dtype} with a cache of {cache.key.dtype}")
    return query.dtype


def _token_strides(cache: LayerCache, tensors: tuple[torch.Tensor, ...]) -> list[int]:
    """Count elements from token to token of tensors [T, heads, D] with contiguous heads."""
    head_size, strides = cache.key.shape[2], []
    for tensor in tensors:
        token, head, inner = tensor.stride()
        if head != head_size or inner != 1:
            raise ValueError(f"heads of {head_size} are not contiguous: strides {tensor.stride()}")
        strides.append(token)
    return strides


def scoring_bytes(scoring: Scoring) -> bytes:
    """Pack how queries score, and how tokens are ranked."""
    return _SCORING.pack(scoring.power, scoring.by_age, scoring.by_page, scoring.merge)


def term_bytes(term: Term, by_age: bool) -> bytes:
    """Pack a term of a ranking; ``by_age``: scores are ranked as means."""
    kind = (term.power, term.reduce == "max", term.reach, term.skip, term.sees_later)
    return _TERM.pack(*kind, by_age, term.weight)


def batch_bytes(batch: DecodeBatch) -> bytes:
    """Pack requests with one new token each."""
    table, fields = batch.block_table, batch.fields
    if fields.dtype != torch.int64:
        raise ValueError(f"fields of {fields.dtype}")
    return _BATCH.pack(
        _address(table), fields.data_ptr(), table.stride(0), *fields.stride(), fields.shape[1]
    )


def chunk_bytes(
    chunk: PromptChunk, first_query: int | None = None, window_scores: torch.Tensor | None = None
) -> bytes:
    """Pack a chunk of a prompt.

    Args:
        chunk: the chunk.
        first_query: queries from here on score; None: from ``first_scoring_query`` on.
        window_scores: [H, attended_len], float32: takes what they add; None: the pages do.

    """
    return _CHUNK.pack(
        _address(chunk.block_table),
        0 if window_scores is None else _window_address(chunk, window_scores),
        chunk.tokens.start,
        chunk.num_tokens,
        chunk.resident_start,
        chunk.logical_start,
        chunk.first_scoring_query if first_query is None else first_query,
        chunk.first_scored_slot,
    )


def packed_bytes(chunk: PromptChunk) -> bytes:
    """Pack a chunk whose survivors are packed."""
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
    """Check a block table, int32 with contiguous rows; return its address."""
    if block_table.dtype != torch.int32 or block_table.stride(-1) != 1:
        stride = block_table.stride()
        raise ValueError(f"a block table of {block_table.dtype} with strides {stride}")
    return block_table.data_ptr()


def _window_address(chunk: PromptChunk, scores: torch.Tensor) -> int:
    """Check the scores of a layer's window, [H, attended_len]; return their address."""
    shape, is_plain = (len(scores), chunk.attended_len), scores.is_contiguous()
    if scores.dtype is not torch.float32 or scores.shape != shape or not is_plain:
        found = f"{scores.dtype} {tuple(scores.shape)}"
        raise ValueError(f"window scores are {found} with strides {scores.stride()}, not {shape}")
    return scores.data_ptr()
