"""At a prompt's end: which tokens survive, and their move to the first slots; every layer at once.

``select_survivors`` finds, for each (layer, request, KV head), the score of the last survivor, bit
by bit from the top of its order-preserving form, then writes the survivors' slots in order;
``pack_survivors`` moves them. None moves to a later slot, so tiles in order are safe in place: what
a tile writes, no later tile reads. Twin of ``reference.pack_survivors``.
"""

from __future__ import annotations

import triton
import triton.language as tl

PACK_FIELDS = ("attended_len", "num_survivors", "recent_start", "num_sinks", "logical_end")
"""Rows of the packing chunks' orders, [len(PACK_FIELDS), R] int32."""
END = tl.constexpr(0)
KEEP = tl.constexpr(1)
RECENT_FROM = tl.constexpr(2)
NUM_SINKS = tl.constexpr(3)
POSITION_END = tl.constexpr(4)


@triton.jit
def ranked_tile(
    scores,
    positions,
    table,
    first,
    end,
    recent_from,
    num_sinks,
    position_end,
    word_stride,
    num_kv_heads,
    h,
    N: tl.constexpr,
    TILE: tl.constexpr,
    BY_PAGE: tl.constexpr,
    BY_AGE: tl.constexpr,
):
    """Of TILE slots: which are resident, which survive anyway, and an int64 that orders scores."""
    slot = first + tl.arange(0, TILE)
    live = slot < end
    block = tl.load(table + slot // N, mask=live, other=0).to(tl.int64)
    words = (block * num_kv_heads + h) * word_stride + slot % N
    score = tl.load(scores + words, mask=live, other=0.0)
    position = tl.load(positions + words, mask=live, other=0)
    if BY_AGE:
        score = score / tl.maximum(position_end - position, 1)
    if BY_PAGE:
        sums = tl.sum(tl.reshape(score, [TILE // N, N]), axis=1)
        score = tl.reshape(tl.broadcast_to(sums[:, None], [TILE // N, N]), [TILE])
    safe = live & ((position >= recent_from) | (position < num_sinks))
    bits = score.to(tl.int32, bitcast=True)
    # Two's complement turned so that it orders as the floats do, then made positive.
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648
    return live, safe, order


@triton.jit(do_not_specialize=["num_chunks", "table_stride", "most"])
def select_survivors(
    score_bases,  # [L], int64: address of each layer's scores
    position_bases,  # [L], int64
    table_ptr,  # [R, P], int32
    fields_ptr,
    survivors_ptr,  # [L, R, H, most], int32: written
    word_stride,
    table_stride,
    num_chunks,
    num_kv_heads,
    most,
    N: tl.constexpr,
    TILE: tl.constexpr,
    BY_PAGE: tl.constexpr,
    BY_AGE: tl.constexpr,
):
    """The slots that survive in (layer, chunk, KV head), in order."""
    h, r, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    scores = tl.load(score_bases + layer).to(tl.pointer_type(tl.float32))
    positions = tl.load(position_bases + layer).to(tl.pointer_type(tl.int32))
    end = tl.load(fields_ptr + END * num_chunks + r)
    keep = tl.load(fields_ptr + KEEP * num_chunks + r)
    recent_from = tl.load(fields_ptr + RECENT_FROM * num_chunks + r)
    num_sinks = tl.load(fields_ptr + NUM_SINKS * num_chunks + r)
    position_end = tl.load(fields_ptr + POSITION_END * num_chunks + r)
    table = table_ptr + r.to(tl.int64) * table_stride
    num_safe = 0
    for first in range(0, end, TILE):
        live, safe, order = ranked_tile(
            scores, positions, table, first, end, recent_from, num_sinks, position_end,
            word_stride, num_kv_heads, h, N, TILE, BY_PAGE, BY_AGE,
        )  # fmt: skip
        num_safe += tl.sum(safe.to(tl.int32), axis=0)
    wanted = keep - num_safe
    # The largest threshold that at least `wanted` candidates reach.
    threshold = tl.full([], 0, tl.int64)
    for i in range(32):
        trial = threshold + (tl.full([], 2147483648, tl.int64) >> i)
        reached = 0
        for first in range(0, end, TILE):
            live, safe, order = ranked_tile(
                scores, positions, table, first, end, recent_from, num_sinks, position_end,
                word_stride, num_kv_heads, h, N, TILE, BY_PAGE, BY_AGE,
            )  # fmt: skip
            reached += tl.sum((live & (safe == 0) & (order >= trial)).to(tl.int32), axis=0)
        threshold = tl.where(reached >= wanted, trial, threshold)
    above = 0
    for first in range(0, end, TILE):
        live, safe, order = ranked_tile(
            scores, positions, table, first, end, recent_from, num_sinks, position_end,
            word_stride, num_kv_heads, h, N, TILE, BY_PAGE, BY_AGE,
        )  # fmt: skip
        above += tl.sum((live & (safe == 0) & (order > threshold)).to(tl.int32), axis=0)
    # Of those at the threshold, the older ones: slots of a prompt are in order of position.
    equals = wanted - above
    written = 0
    survivors = survivors_ptr + ((layer * num_chunks + r).to(tl.int64) * num_kv_heads + h) * most
    for first in range(0, end, TILE):
        live, safe, order = ranked_tile(
            scores, positions, table, first, end, recent_from, num_sinks, position_end,
            word_stride, num_kv_heads, h, N, TILE, BY_PAGE, BY_AGE,
        )  # fmt: skip
        level = (live & (safe == 0) & (order == threshold)).to(tl.int32)
        rank = tl.cumsum(level, axis=0)
        stays = safe | (live & (order > threshold)) | ((level == 1) & (rank <= equals))
        equals -= tl.sum(level, axis=0)
        count = stays.to(tl.int32)
        at = written + tl.cumsum(count, axis=0) - 1
        tl.store(survivors + at, first + tl.arange(0, TILE), mask=stays & (at < keep))
        written += tl.sum(count, axis=0)


@triton.jit(do_not_specialize=["num_chunks", "table_stride", "most"])
def pack_survivors(
    key_bases,  # [L], int64
    value_bases,
    score_bases,
    position_bases,
    table_ptr,
    fields_ptr,
    survivors_ptr,
    key_type,  # any tensor of the cache's dtype
    page_stride,
    word_stride,
    table_stride,
    num_chunks,
    num_kv_heads,
    most,
    N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Move the survivors of (layer, chunk, KV head) into slots [0, keep)."""
    h, r, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    keep = tl.load(fields_ptr + KEEP * num_chunks + r)
    table = table_ptr + r.to(tl.int64) * table_stride
    # What the compiler knows of an argument, and not of an address that is read: whole vectors.
    keys = tl.multiple_of(tl.load(key_bases + layer).to(key_type.dtype), ALIGNED)
    values = tl.multiple_of(tl.load(value_bases + layer).to(key_type.dtype), ALIGNED)
    scores = tl.load(score_bases + layer).to(tl.pointer_type(tl.float32))
    positions = tl.load(position_bases + layer).to(tl.pointer_type(tl.int32))
    survivors = survivors_ptr + ((layer * num_chunks + r).to(tl.int64) * num_kv_heads + h) * most
    dim = tl.arange(0, D_PAD)
    for first in range(0, keep, TILE):
        to = first + tl.arange(0, TILE)
        live = to < keep
        source = tl.load(survivors + to, mask=live, other=0)
        old = tl.load(table + source // N, mask=live, other=0).to(tl.int64) * num_kv_heads + h
        new = tl.load(table + to // N, mask=live, other=0).to(tl.int64) * num_kv_heads + h
        mask = live[:, None] & (dim < D)[None, :]
        here = (old * page_stride + source % N * D)[:, None] + dim[None, :]
        there = (new * page_stride + to % N * D)[:, None] + dim[None, :]
        word_here, word_there = old * word_stride + source % N, new * word_stride + to % N
        key = tl.load(keys + here, mask=mask)
        value = tl.load(values + here, mask=mask)
        score = tl.load(scores + word_here, mask=live)
        position = tl.load(positions + word_here, mask=live)
        # Other threads of this program may still read what is written next.
        tl.debug_barrier()
        tl.store(keys + there, key, mask=mask)
        tl.store(values + there, value, mask=mask)
        tl.store(scores + word_there, score, mask=live)
        tl.store(positions + word_there, position, mask=live)
