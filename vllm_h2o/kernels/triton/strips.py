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
def split_size(attended_len, num_kv_splits, TILE: tl.constexpr):
    """Slots of each split: whole tiles, the same number for all but the last."""
    return tl.cdiv(tl.cdiv(attended_len, TILE), num_kv_splits) * TILE
