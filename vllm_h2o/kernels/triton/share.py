# SPDX-License-Identifier: Apache-2.0
"""At a prompt's end, where the KV heads of a layer share its slots: how many pages each has.

Layers that share slots look like one layer here, see ``cache.LayerCache.joined``: each row of a
block is one of its heads'.

``count_best`` finds, for each (layer, request), the score of the last of the best tokens of all KV
heads, bit by bit as ``pack.select_survivors`` does in one, a launch for each bit, and then counts
how many each has; ``share_rows`` makes pages of that. Rows of one head may become another's, so
survivors move in two launches: ``move_shared`` copies all of a layer's, and then stores them. Twin
of ``split.split_capacity``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_h2o.kernels.batch import PromptChunk
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.triton.pack import (
    ATTENDED_LEN,
    LOGICAL_END,
    NUM_SINKS,
    NUM_SURVIVORS,
    RECENT_START,
    SPLITS,
    ranked_tile,
    score_at,
)
from vllm_h2o.kernels.triton.tiles import kv_offsets, locate, page_row

BITS = tl.constexpr(32)
"""Bits of a sort key."""


def most_survivors(chunk: PromptChunk, cache: LayerCache) -> int:
    """An upper bound of what a KV head keeps, known before scores are: with all the best tokens."""
    more = cache.shared_tenths * chunk.num_heavy * (cache.num_kv_heads - 1) // 10
    return min(chunk.attended_len, chunk.num_survivors + more + cache.block_size)


@triton.jit
def heavy_hitters(fields, num_chunks):
    """Count the survivors of a KV head, on average, that are there for their scores."""
    num_recent = tl.load(fields + LOGICAL_END * num_chunks)
    num_recent -= tl.load(fields + RECENT_START * num_chunks)
    num_sinks = tl.load(fields + NUM_SINKS * num_chunks)
    return tl.load(fields + NUM_SURVIVORS * num_chunks) - num_sinks - num_recent


@triton.jit
def share_pages(
    count,  # [H_PAD]: of the best tokens, those of each head
    head,  # [H_PAD]
    num_kv_heads,
    shared_tenths,
    capacity,
    num_heavy,
    attended_len,
    N: tl.constexpr,
):
    """[H_PAD]: pages of each head; what rounding leaves goes to where most was cut off."""
    live = head < num_kv_heads
    tenths = 10 * capacity + shared_tenths * (count - num_heavy)
    least = tl.cdiv(capacity - num_heavy + tl.minimum(num_heavy, 1), N)
    most = (attended_len + 1) // N
    pages = tl.where(live, tl.maximum(tenths // (10 * N), least), 0)
    total = num_kv_heads * (capacity // N)
    # Of each head less than a page was cut off, and less than a page was added.
    for _ in range(num_kv_heads):
        left = total - tl.sum(pages, axis=0)
        missing = tl.where(left > 0, 1, -1) * (tenths - pages * 10 * N)
        able = live & tl.where(left > 0, pages < most, pages > least)
        missing = tl.where(able, missing, -2147483648)
        neediest = able & (missing == tl.max(missing, axis=0))
        chosen = tl.min(tl.where(neediest, head, 2147483647), axis=0)
        change = tl.where(left > 0, 1, tl.where(left < 0, -1, 0))
        pages += tl.where(head == chosen, change, 0)
    return pages


@triton.jit(do_not_specialize=["num_chunks", "table_stride", "bit"])
def count_best(
    score_bases,  # [L], int64: address of each layer's scores
    position_bases,  # [L], int64
    block_table_ptr,  # [R, P], int32
    fields_ptr,
    reached_ptr,  # [L, R, BITS], int32, zeros at first: candidates that reach what was tried
    counts_ptr,  # [L, R, H, 2], int32: written: of each head those above the threshold, and at it
    word_stride,
    table_stride,
    num_chunks,
    num_kv_heads,
    bit,  # from the top of a sort key; BITS, once all are found
    N: tl.constexpr,
    TILE: tl.constexpr,
    BY_AGE: tl.constexpr,
    APART: tl.constexpr,
):
    """Try one bit of the threshold in (layer, chunk, KV head).

    It is the largest threshold that at least as many candidates of all heads reach as are wanted.
    """
    h, r, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = fields_ptr + r
    if tl.load(fields + SPLITS * num_chunks) == 0:
        return
    scores = tl.load(score_bases + layer).to(tl.pointer_type(tl.float32))
    positions = tl.load(position_bases + layer).to(tl.pointer_type(tl.int32))
    attended_len = tl.load(fields + ATTENDED_LEN * num_chunks)
    recent_start = tl.load(fields + RECENT_START * num_chunks)
    num_sinks = tl.load(fields + NUM_SINKS * num_chunks)
    logical_end = tl.load(fields + LOGICAL_END * num_chunks)
    block_table = block_table_ptr + r.to(tl.int64) * table_stride
    request = (layer * num_chunks + r).to(tl.int64)
    reached_ptr += request * BITS
    tried = tl.arange(0, BITS)
    reached = tl.load(reached_ptr + tried, mask=tried < bit, other=0)
    num_heavy = heavy_hitters(fields, num_chunks)
    accepted = (tried < bit) & (reached >= num_heavy * num_kv_heads)
    tops = tl.full([BITS], 2147483648, tl.int64) >> tried
    threshold = tl.sum(tl.where(accepted | (tried == bit), tops, 0), axis=0)
    above, tied = 0, 0
    for start in range(0, attended_len, TILE):
        candidate, safe, sort_key = ranked_tile(
            scores, positions, block_table, start, attended_len, recent_start, num_sinks,
            logical_end, word_stride, num_kv_heads, h, N, TILE, False, BY_AGE, APART,
        )  # fmt: skip
        above += tl.sum((candidate & (sort_key > threshold)).to(tl.int32), axis=0)
        tied += tl.sum((candidate & (sort_key == threshold)).to(tl.int32), axis=0)
    if bit < BITS:
        tl.atomic_add(reached_ptr + bit, above + tied, sem="relaxed")
    else:
        count = counts_ptr + (request * num_kv_heads + h) * 2
        tl.store(count, above)
        tl.store(count + 1, tied)


@triton.jit(do_not_specialize=["num_chunks", "table_stride"])
def share_rows(
    first_row_bases,  # [L], int64: address of each layer's [num_blocks, H + 1], int32: written
    new_table_ptr,  # [R, P'], int32: pages that survivors go to
    fields_ptr,
    counts_ptr,  # [L, R, H, 2], int32: see count_best
    table_stride,
    num_chunks,
    num_kv_heads,
    shared_tenths,
    N: tl.constexpr,
    H_PAD: tl.constexpr,
):
    """Where the rows of each KV head begin in (layer, chunk)."""
    r, layer = tl.program_id(0), tl.program_id(1)
    fields = fields_ptr + r
    if tl.load(fields + SPLITS * num_chunks) == 0:
        return
    first_rows = tl.load(first_row_bases + layer).to(tl.pointer_type(tl.int32))
    attended_len = tl.load(fields + ATTENDED_LEN * num_chunks)
    capacity = tl.load(fields + NUM_SURVIVORS * num_chunks) + 1
    num_heavy = heavy_hitters(fields, num_chunks)
    head = tl.arange(0, H_PAD)
    counts = counts_ptr + (layer * num_chunks + r).to(tl.int64) * num_kv_heads * 2 + head * 2
    above = tl.load(counts, mask=head < num_kv_heads, other=0)
    tied = tl.load(counts + 1, mask=head < num_kv_heads, other=0)
    # Of those at the threshold, the ones of lower heads.
    ties_left = num_heavy * num_kv_heads - tl.sum(above, axis=0) - (tl.cumsum(tied, axis=0) - tied)
    count = above + tl.minimum(tl.maximum(ties_left, 0), tied)
    pages = share_pages(
        count, head, num_kv_heads, shared_tenths, capacity, num_heavy, attended_len, N
    )
    first_block = tl.load(new_table_ptr + r.to(tl.int64) * table_stride).to(tl.int64)
    bounds = first_rows + first_block * (num_kv_heads + 1)
    tl.store(bounds, 0)
    tl.store(bounds + 1 + head, tl.cumsum(pages, axis=0), mask=head < num_kv_heads)


@triton.jit(
    do_not_specialize=["layer", "num_chunks", "table_stride", "max_slots"],
    do_not_specialize_on_alignment=["old_scores"],  # of any layer, each as long as the prompt is
)
def move_shared(
    key_pages,
    value_pages,
    old_scores,  # those that are ranked
    score_pages,  # those in the pages; the same, in place
    position_pages,
    without_pages,  # scores without the observation window; read where KEEPS
    first_rows_ptr,  # [num_blocks, H + 1], int32
    block_table_ptr,
    new_table_ptr,
    fields_ptr,
    survivors_ptr,  # [L, R, max_slots], int32: likewise
    kept_key,  # [R * max_slots, D]: of all KV heads of a request, one after the other
    kept_value,
    kept_score,  # [R * max_slots], float32
    kept_position,  # [R * max_slots], int32
    kept_without,  # [R * max_slots], float32
    layer,
    page_stride,
    word_stride,
    table_stride,
    num_chunks,
    num_kv_heads,
    max_slots,
    N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    STORES: tl.constexpr,
    APART: tl.constexpr,
    KEEPS: tl.constexpr,
):
    """TILE survivors of (chunk, KV head) of one layer: copied, or stored in their new slots."""
    h, r, t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(fields_ptr + r + SPLITS * num_chunks) == 0:
        return
    block_table = block_table_ptr + r.to(tl.int64) * table_stride
    new_table = new_table_ptr + r.to(tl.int64) * table_stride
    bounds = first_rows_ptr + tl.load(new_table).to(tl.int64) * (num_kv_heads + 1) + h
    first_row = tl.load(bounds)
    num_survivors = (tl.load(bounds + 1) - first_row) * N - 1
    if t * TILE >= num_survivors:
        return
    slot = t * TILE + tl.arange(0, TILE)
    live = slot < num_survivors
    dim = tl.arange(0, D_PAD)
    mask = live[:, None] & (dim < D)[None, :]
    kept = r.to(tl.int64) * max_slots + first_row * N + slot
    kept_kv = (kept * D)[:, None] + dim[None, :]
    if STORES:
        row = page_row(new_table, slot // N, live, first_row, 1, num_kv_heads, True)
        kv, word = kv_offsets(row, slot % N, dim, page_stride, D), row * word_stride + slot % N
        tl.store(key_pages + kv, tl.load(kept_key + kept_kv, mask=mask), mask=mask)
        tl.store(value_pages + kv, tl.load(kept_value + kept_kv, mask=mask), mask=mask)
        tl.store(score_pages + word, tl.load(kept_score + kept, mask=live), mask=live)
        tl.store(position_pages + word, tl.load(kept_position + kept, mask=live), mask=live)
        if KEEPS:
            tl.store(without_pages + word, tl.load(kept_without + kept, mask=live), mask=live)
    else:
        survivors = survivors_ptr + layer.to(tl.int64) * num_chunks * max_slots
        old_slot = tl.load(survivors + kept, mask=live, other=0)
        row, offset = locate(block_table, old_slot, live, h, num_kv_heads, N)
        kv, word = kv_offsets(row, offset, dim, page_stride, D), row * word_stride + offset
        tl.store(kept_key + kept_kv, tl.load(key_pages + kv, mask=mask), mask=mask)
        tl.store(kept_value + kept_kv, tl.load(value_pages + kv, mask=mask), mask=mask)
        attended_len = tl.load(fields_ptr + r + ATTENDED_LEN * num_chunks)
        score_word = score_at(word, old_slot, h, attended_len, APART)
        tl.store(kept_score + kept, tl.load(old_scores + score_word, mask=live), mask=live)
        tl.store(kept_position + kept, tl.load(position_pages + word, mask=live), mask=live)
        if KEEPS:
            tl.store(kept_without + kept, tl.load(without_pages + word, mask=live), mask=live)
