# SPDX-License-Identifier: Apache-2.0
"""A victim is merged into the nearest key of its KV head, before the new token takes its slot.

``nearest_key`` finds the largest cosine in each split of the slots; ``take_victim_in`` takes the
best of those, and writes the means. Twins of ``merge.nearest``
and ``merge.merged``. A cosine stands here as the square of the product of both keys, divided by
that of the other key's length: as good to compare, without roots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_h2o.kernels.triton.strips import (
    ATTENDED_LEN,
    LOGICAL_START,
    OVERWRITES,
    new_slot,
    program_of,
    split_of,
    split_size,
    strip_of,
)
from vllm_h2o.kernels.triton.tiles import load_slots, page_row


@triton.jit(do_not_specialize=["first_head", "num_requests", "num_kv_splits", "num_spare"])
def nearest_key(
    key_pages,  # [R, N, D]
    block_table_ptr,  # [B, P], int32
    fields_ptr,  # [len(DECODE_FIELDS), B], int64
    victims_ptr,  # [num_blocks, H], int32
    first_rows_ptr,  # [num_blocks, H + 1], int32; read when CAN_SPLIT
    nearest_ptr,  # [programs, H, 2], float32: written, the best square and its slot
    page_stride,
    table_stride,
    field_stride,
    request_stride,
    num_kv_heads,
    rows_per_block,
    first_head,
    num_requests,
    num_kv_splits,
    num_spare,
    N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    CAN_SPLIT: tl.constexpr,
    MAX_KV_SPLITS: tl.constexpr,
    SPLIT_SLOTS: tl.constexpr,
):
    """The key nearest to the victim's in one split of (request, KV head), if any has a victim."""
    h, program = tl.program_id(0), tl.program_id(1)
    b, s, num_splits, _ = split_of(
        fields_ptr, field_stride, request_stride, num_requests, num_kv_splits, num_spare, program,
        MAX_KV_SPLITS, SPLIT_SLOTS,
    )  # fmt: skip
    if b == num_requests:
        return
    fields = fields_ptr + b * request_stride
    has_victim = tl.load(fields + OVERWRITES * field_stride) != 0
    if (tl.load(fields + ATTENDED_LEN * field_stride) == 0) | (has_victim == 0):
        return
    block_table = block_table_ptr + b.to(tl.int64) * table_stride
    first_row, row_step, length = strip_of(
        fields, field_stride, first_rows_ptr, block_table, h, num_kv_heads, rows_per_block,
        first_head, N, CAN_SPLIT,
    )  # fmt: skip
    size = split_size(length, num_splits, TILE)
    begin = s * size
    if begin >= length:
        return
    first_block = tl.load(block_table)
    victim = new_slot(fields, field_stride, length, victims_ptr, first_block, h, num_kv_heads)
    own_row = page_row(
        block_table, victim // N, victim >= 0, first_row, row_step, rows_per_block, CAN_SPLIT
    )
    dim = tl.arange(0, D_PAD)
    own_ptrs = key_pages + own_row * page_stride + victim % N * D + dim
    own = tl.load(own_ptrs, mask=dim < D, other=0.0).to(tl.float32)  # [D_PAD]
    # Running maxima, each in its own lane: of equals the first.
    best = tl.zeros([TILE], tl.float32)
    best_slot = tl.zeros([TILE], tl.int32)
    for start in range(begin, tl.minimum(begin + size, length), TILE):
        slot = start + tl.arange(0, TILE)
        live = slot < length
        row = page_row(block_table, slot // N, live, first_row, row_step, rows_per_block, CAN_SPLIT)
        key = load_slots(key_pages, row, slot % N, live, dim, page_stride, D).to(tl.float32)
        dots = tl.maximum(tl.sum(key * own[None, :], axis=1), 0.0)
        square = dots * dots / tl.maximum(tl.sum(key * key, axis=1), 1e-30)
        better = live & (slot != victim) & (square > best)
        best = tl.where(better, square, best)
        best_slot = tl.where(better, slot, best_slot)
    largest = tl.max(best, axis=0)
    nearest = tl.min(tl.where(best == largest, best_slot, 2147483647), axis=0)
    partial = nearest_ptr + (program * num_kv_heads + h).to(tl.int64) * 2
    tl.store(partial, largest)
    tl.store(partial + 1, nearest.to(tl.float32))  # exact up to 2 ** 24 slots


@triton.jit
def attention_paid(score_pages, position_pages, word, end, POWER: tl.constexpr):
    """Read the weight of a token where scores are means: see ``merge.attention_paid``."""
    mean = tl.load(score_pages + word) / (end - tl.load(position_pages + word))
    return tl.sqrt(mean) if POWER == 2 else mean


@triton.jit(do_not_specialize=["first_head", "num_requests", "num_kv_splits", "num_spare"])
def take_victim_in(
    key_pages,  # [R, N, D]
    value_pages,  # [R, N, D]
    score_pages,  # [R, N], float32; read when BY_AGE
    position_pages,  # [R, N], int32; read when BY_AGE
    mass_pages,  # [R, N], float32
    nearest_ptr,  # [programs, H, 2], float32: see nearest_key
    block_table_ptr,
    fields_ptr,
    victims_ptr,
    first_rows_ptr,
    merge,  # the cosine above which a victim is merged
    page_stride,
    word_stride,
    table_stride,
    field_stride,
    request_stride,
    num_kv_heads,
    rows_per_block,
    first_head,
    num_requests,
    num_kv_splits,
    num_spare,
    N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    MAX_KV_SPLITS: tl.constexpr,
    SPLIT_SLOTS: tl.constexpr,
    POWER: tl.constexpr,
    BY_AGE: tl.constexpr,
    CAN_SPLIT: tl.constexpr,
):
    """Write K, V and mass of the slot nearest to the victim's, of all splits, if near enough."""
    h, b = tl.program_id(0), tl.program_id(1)
    fields = fields_ptr + b * request_stride
    has_victim = tl.load(fields + OVERWRITES * field_stride) != 0
    if (tl.load(fields + ATTENDED_LEN * field_stride) == 0) | (has_victim == 0):
        return
    block_table = block_table_ptr + b.to(tl.int64) * table_stride
    first_row, row_step, length = strip_of(
        fields, field_stride, first_rows_ptr, block_table, h, num_kv_heads, rows_per_block,
        first_head, N, CAN_SPLIT,
    )  # fmt: skip
    first_block = tl.load(block_table)
    victim = new_slot(fields, field_stride, length, victims_ptr, first_block, h, num_kv_heads)
    row = page_row(
        block_table, victim // N, victim >= 0, first_row, row_step, rows_per_block, CAN_SPLIT
    )
    offset, dim = victim % N, tl.arange(0, D_PAD)
    _, _, num_splits, first = split_of(
        fields_ptr, field_stride, request_stride, num_requests, num_kv_splits, num_spare,
        num_spare + b * num_kv_splits, MAX_KV_SPLITS, SPLIT_SLOTS,
    )  # fmt: skip
    split = tl.arange(0, MAX_KV_SPLITS)
    live = split < tl.cdiv(length, split_size(length, num_splits, TILE))
    program = program_of(b, split, first, num_kv_splits, num_spare)
    nearest = nearest_ptr + (program * num_kv_heads + h).to(tl.int64) * 2
    squares = tl.load(nearest, mask=live, other=-1.0)
    slots = tl.load(nearest + 1, mask=live, other=0.0)
    largest = tl.max(squares, axis=0)
    slot = tl.min(tl.where(squares == largest, slots, float("inf")), axis=0).to(tl.int32)
    mask, at = dim < D, row * page_stride + offset * D + dim
    key = tl.load(key_pages + at, mask=mask, other=0.0).to(tl.float32)  # [D_PAD]
    if largest > merge * merge * tl.sum(key * key, axis=0):
        value = tl.load(value_pages + at, mask=mask, other=0.0).to(tl.float32)  # [D_PAD]
        word = row * word_stride + offset
        mass = tl.load(mass_pages + word)
        to_row = page_row(
            block_table, slot // N, slot >= 0, first_row, row_step, rows_per_block, CAN_SPLIT
        )
        to_word = to_row * word_stride + slot % N
        to = to_row * page_stride + slot % N * D + dim
        held = tl.load(mass_pages + to_word)
        own, other = held, mass
        if BY_AGE:
            end = tl.load(fields + LOGICAL_START * field_stride).to(tl.int32)
            own = attention_paid(score_pages, position_pages, to_word, end, POWER)
            other = attention_paid(score_pages, position_pages, word, end, POWER)
        share = other / tl.maximum(own + other, 1e-38)
        held_key = tl.load(key_pages + to, mask=mask, other=0.0).to(tl.float32)
        held_value = tl.load(value_pages + to, mask=mask, other=0.0).to(tl.float32)
        new_key = held_key + share * (key - held_key)
        new_value = held_value + share * (value - held_value)
        element = key_pages.dtype.element_ty
        tl.store(key_pages + to, new_key.to(element), mask=mask)
        tl.store(value_pages + to, new_value.to(element), mask=mask)
        # Other threads of this program may still read the mass.
        tl.debug_barrier()
        tl.store(mass_pages + to_word, held + mass)
