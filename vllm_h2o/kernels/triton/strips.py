# SPDX-License-Identifier: Apache-2.0
"""Read one KV head of one request from a decode batch, and divide its slots among programs."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_h2o.kernels.batch import DECODE_FIELDS

TOKEN = tl.constexpr(DECODE_FIELDS.index("token"))
ATTENDED_LEN = tl.constexpr(DECODE_FIELDS.index("attended_len"))
OVERWRITES = tl.constexpr(DECODE_FIELDS.index("overwrites"))
SELECTS = tl.constexpr(DECODE_FIELDS.index("selects"))
LOGICAL_START = tl.constexpr(DECODE_FIELDS.index("logical_start"))
RECENT_START = tl.constexpr(DECODE_FIELDS.index("recent_start"))
NUM_SINKS = tl.constexpr(DECODE_FIELDS.index("num_sinks"))
SCORES = tl.constexpr(DECODE_FIELDS.index("scores"))
SPLIT = tl.constexpr(DECODE_FIELDS.index("split"))
ROWS = tl.constexpr(256)
"""Requests whose lengths a program loads at once."""
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def strip_of(
    fields, field_stride, first_rows_ptr, block_table, h, num_kv_heads, rows_per_block, first_head,
    N: tl.constexpr, CAN_SPLIT: tl.constexpr,
):  # fmt: skip
    """(first row, row step, slots attended to) of a KV head; see cache.py."""
    length = tl.load(fields + ATTENDED_LEN * field_stride).to(tl.int32)
    first_row, row_step = first_head + h, rows_per_block
    if CAN_SPLIT:
        split = tl.load(fields + SPLIT * field_stride) != 0
        bounds = first_rows_ptr + tl.load(block_table).to(tl.int64) * (num_kv_heads + 1) + h
        begin = tl.load(bounds)
        length = tl.where(split, (tl.load(bounds + 1) - begin) * N, length)
        first_row = tl.where(split, begin, first_row)
        row_step = tl.where(split, 1, row_step)
    return first_row, row_step, length


@triton.jit
def new_slot(fields, field_stride, length, victims_ptr, first_block, h, num_kv_heads):
    """The slot that a head's new token takes. ``fields`` points at the request's."""
    overwrites = tl.load(fields + OVERWRITES * field_stride) != 0
    victim = tl.load(victims_ptr + first_block.to(tl.int64) * num_kv_heads + h)
    return tl.where(overwrites, victim, length - 1)


@triton.jit
def same_in_all_threads(x):
    """``x``, of which the compiler then knows so: what follows from it takes no thread's register.

    Without it ``attend_split`` spills, and ``nearest_key`` takes half as many registers again.
    """
    if COMPILED:
        asm: tl.constexpr = "shfl.sync.idx.b32 $0, $1, 0, 31, -1;"
        x = tl.inline_asm_elementwise(asm, "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    return x


@triton.jit
def split_of(
    fields_ptr, field_stride, request_stride, num_requests, num_kv_splits, num_spare, program,
    MAX_KV_SPLITS: tl.constexpr, SPLIT_SLOTS: tl.constexpr,
):  # fmt: skip
    """(request, split, splits of that request, the first spare program that it has) of a program.

    The first ``num_spare`` programs of a KV head go to requests that have more than
    ``num_kv_splits`` splits, in order; to request ``num_requests`` if there are not as many. The
    others are those of every request. Lengths are averages where KV heads share slots.

    A split has at least SPLIT_SLOTS slots, if there are more than ``num_kv_splits``, and at least
    as many as leave no split without a program: all slots of the batch, divided by ``num_spare``.
    """
    is_spare = program < num_spare
    own = tl.maximum(program - num_spare, 0)
    b, s = own // num_kv_splits, own % num_kv_splits
    lengths_ptr = fields_ptr + ATTENDED_LEN * field_stride
    length = tl.load(lengths_ptr + b * request_stride)
    num_splits, first = num_kv_splits, num_spare
    if (is_spare | (length > num_kv_splits * SPLIT_SLOTS)) & (num_spare > 0):
        total = tl.zeros([ROWS], tl.int64)
        for start in range(0, num_requests, ROWS):
            row = start + tl.arange(0, ROWS)
            total += tl.load(lengths_ptr + row * request_stride, mask=row < num_requests, other=0)
        size = tl.maximum(tl.cdiv(tl.sum(total, axis=0), num_spare), SPLIT_SLOTS)
        first, num_before, num_more = num_spare * 0, num_spare * 0, num_spare * 0
        for start in range(0, num_requests, ROWS):
            row = start + tl.arange(0, ROWS)
            lengths = tl.load(lengths_ptr + row * request_stride, mask=row < num_requests, other=0)
            wanted = tl.minimum(tl.cdiv(lengths, size), MAX_KV_SPLITS).to(tl.int32)
            more = tl.maximum(wanted - num_kv_splits, 0)
            ends = num_more + tl.cumsum(more, axis=0)
            before = (row < num_requests) & tl.where(is_spare, ends <= program, row < b)
            num_before += tl.sum(before.to(tl.int32), axis=0)
            first += tl.sum(tl.where(before, more, 0), axis=0)
            num_more += tl.sum(more, axis=0)
        b = num_before
        if is_spare:
            s = num_kv_splits + program - first
            length = tl.load(lengths_ptr + b * request_stride, mask=b < num_requests, other=0)
        wanted = tl.minimum(tl.cdiv(length, size), MAX_KV_SPLITS).to(tl.int32)
        num_splits = tl.maximum(wanted, num_kv_splits)
    b, s = same_in_all_threads(b), same_in_all_threads(s)
    return b, s, same_in_all_threads(num_splits), same_in_all_threads(first)


@triton.jit
def program_of(b, split, first, num_kv_splits, num_spare):
    """The programs that have these splits of a request: the inverse of :func:`split_of`."""
    further = first + split - num_kv_splits
    return tl.where(split < num_kv_splits, num_spare + b * num_kv_splits + split, further)


@triton.jit
def split_size(length, num_splits, TILE: tl.constexpr):
    """Slots of each split: whole tiles, the same number for all but the last."""
    return tl.cdiv(tl.cdiv(length, TILE), num_splits) * TILE
