# SPDX-License-Identifier: Apache-2.0
"""At a prompt's end: which tokens survive, and their move to the first slots; every layer at once.

``select_survivors`` finds, for each (layer, request, KV head), the score of the last survivor, bit
by bit from the top of a sort key, an integer that orders as scores do; then it writes the slots of
the survivors in order. ``pack_survivors`` moves them. None moves to a later slot, so tiles in order
are safe in place: what a tile writes, no later tile reads. Twin of ``reference.pack_survivors``.

Where whole pages are evicted (BY_PAGE), the rank of each token is the sum of its page's, and a page
that has a sink or a recent token, or is not full, survives. The page size is a power of two then.

Where others read the prompt's pages (APART), survivors go to pages of a second table, and scores
lie outside the pages, those of each (layer, KV head) after the last's.

An address of a layer's view is that of its first row in a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_h2o.kernels.triton.tiles import kv_offsets, locate

PACK_FIELDS = (
    "attended_len",
    "num_survivors",
    "recent_start",
    "num_sinks",
    "logical_end",
    "splits",
)
"""Attributes of PromptChunk: rows of ``fields_ptr``, [len(PACK_FIELDS), R] int32."""
ATTENDED_LEN = tl.constexpr(PACK_FIELDS.index("attended_len"))
NUM_SURVIVORS = tl.constexpr(PACK_FIELDS.index("num_survivors"))
RECENT_START = tl.constexpr(PACK_FIELDS.index("recent_start"))
NUM_SINKS = tl.constexpr(PACK_FIELDS.index("num_sinks"))
LOGICAL_END = tl.constexpr(PACK_FIELDS.index("logical_end"))
SPLITS = tl.constexpr(PACK_FIELDS.index("splits"))


@triton.jit
def score_at(words, slot, h, attended_len, APART: tl.constexpr):
    """Where the scores of slots lie: in the pages, or one after the other."""
    if APART:
        return h * attended_len + slot
    else:
        return words


@triton.jit
def ranked_tile(
    scores,
    positions,
    block_table,
    start,
    attended_len,
    recent_start,
    num_sinks,
    logical_end,
    word_stride,
    rows_per_block,
    h,
    N: tl.constexpr,
    TILE: tl.constexpr,
    BY_PAGE: tl.constexpr,
    BY_AGE: tl.constexpr,
    APART: tl.constexpr,
):
    """Rank TILE slots: which compete, which survive anyway, and the sort key, int64."""
    slot = start + tl.arange(0, TILE)
    live = slot < attended_len
    row, offset = locate(block_table, slot, live, h, rows_per_block, N)
    words = row * word_stride + offset
    score_words = score_at(words, slot, h, attended_len, APART)
    score = tl.load(scores + score_words, mask=live, other=0.0)
    position = tl.load(positions + words, mask=live, other=0)
    if BY_AGE:
        score = score / tl.maximum(logical_end - position, 1)
    candidate = live & (position < recent_start) & (position >= num_sinks)
    if BY_PAGE:
        sums = tl.sum(tl.reshape(score, [TILE // N, N]), axis=1)
        score = tl.reshape(tl.broadcast_to(sums[:, None], [TILE // N, N]), [TILE])
        goes = tl.sum(tl.reshape(candidate.to(tl.int32), [TILE // N, N]), axis=1) == N
        candidate = tl.reshape(tl.broadcast_to(goes[:, None], [TILE // N, N]), [TILE])
    bits = score.to(tl.int32, bitcast=True)
    # Negative floats order the wrong way round as integers: flipped, then all made positive.
    sort_key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648
    return candidate, live & (candidate == 0), sort_key


@triton.jit(do_not_specialize=["num_chunks", "table_stride", "max_survivors"])
def select_survivors(
    score_bases,  # [L], int64: address of each layer's scores
    position_bases,  # [L], int64
    first_row_bases,  # [L], int64; read when CAN_SPLIT
    block_table_ptr,  # [R, P], int32
    new_table_ptr,  # [R, P'], int32: pages that survivors go to; the same, in place
    fields_ptr,
    survivors_ptr,  # [L, R, H * max_survivors], int32: written
    word_stride,
    table_stride,
    num_chunks,
    rows_per_block,
    max_survivors,
    N: tl.constexpr,
    TILE: tl.constexpr,
    BY_PAGE: tl.constexpr,
    BY_AGE: tl.constexpr,
    CAN_SPLIT: tl.constexpr,
    APART: tl.constexpr,
):
    """Write the slots that survive in (layer, chunk, KV head), in order."""
    h, r, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads = tl.num_programs(0)
    scores = tl.load(score_bases + layer).to(tl.pointer_type(tl.float32))
    positions = tl.load(position_bases + layer).to(tl.pointer_type(tl.int32))
    fields = fields_ptr + r
    attended_len = tl.load(fields + ATTENDED_LEN * num_chunks)
    num_survivors = tl.load(fields + NUM_SURVIVORS * num_chunks)
    recent_start = tl.load(fields + RECENT_START * num_chunks)
    num_sinks = tl.load(fields + NUM_SINKS * num_chunks)
    logical_end = tl.load(fields + LOGICAL_END * num_chunks)
    block_table = block_table_ptr + r.to(tl.int64) * table_stride
    first_listed = h * max_survivors
    if CAN_SPLIT:
        splits = tl.load(fields + SPLITS * num_chunks) != 0
        first_rows = tl.load(first_row_bases + layer).to(tl.pointer_type(tl.int32))
        first_block = tl.load(new_table_ptr + r.to(tl.int64) * table_stride).to(tl.int64)
        bounds = first_rows + first_block * (num_kv_heads + 1) + h
        begin = tl.load(bounds)
        own = (tl.load(bounds + 1) - begin) * N - 1
        num_survivors = tl.where(splits, own, num_survivors)
        first_listed = tl.where(splits, begin * N, first_listed)
    num_safe = 0
    for start in range(0, attended_len, TILE):
        candidate, safe, sort_key = ranked_tile(
            scores, positions, block_table, start, attended_len, recent_start, num_sinks,
            logical_end, word_stride, rows_per_block, h, N, TILE, BY_PAGE, BY_AGE, APART,
        )  # fmt: skip
        num_safe += tl.sum(safe.to(tl.int32), axis=0)
    wanted = num_survivors - num_safe
    # The largest threshold that at least `wanted` candidates reach.
    threshold = tl.full([], 0, tl.int64)
    for i in range(32):
        trial = threshold + (tl.full([], 2147483648, tl.int64) >> i)
        reached = 0
        for start in range(0, attended_len, TILE):
            candidate, safe, sort_key = ranked_tile(
                scores, positions, block_table, start, attended_len, recent_start, num_sinks,
                logical_end, word_stride, rows_per_block, h, N, TILE, BY_PAGE, BY_AGE, APART,
            )  # fmt: skip
            reached += tl.sum((candidate & (sort_key >= trial)).to(tl.int32), axis=0)
        threshold = tl.where(reached >= wanted, trial, threshold)
    num_above = 0
    for start in range(0, attended_len, TILE):
        candidate, safe, sort_key = ranked_tile(
            scores, positions, block_table, start, attended_len, recent_start, num_sinks,
            logical_end, word_stride, rows_per_block, h, N, TILE, BY_PAGE, BY_AGE, APART,
        )  # fmt: skip
        num_above += tl.sum((candidate & (sort_key > threshold)).to(tl.int32), axis=0)
    # Of those at the threshold, the older ones: slots of a prompt are in order of position.
    ties_left = wanted - num_above
    num_written = 0
    listed = (layer * num_chunks + r).to(tl.int64) * num_kv_heads * max_survivors
    survivors = survivors_ptr + listed + first_listed
    for start in range(0, attended_len, TILE):
        candidate, safe, sort_key = ranked_tile(
            scores, positions, block_table, start, attended_len, recent_start, num_sinks,
            logical_end, word_stride, rows_per_block, h, N, TILE, BY_PAGE, BY_AGE, APART,
        )  # fmt: skip
        tied = (candidate & (sort_key == threshold)).to(tl.int32)
        tie_rank = tl.cumsum(tied, axis=0)
        survives = safe | (candidate & (sort_key > threshold)) | (
            (tied == 1) & (tie_rank <= ties_left)
        )  # fmt: skip
        ties_left -= tl.sum(tied, axis=0)
        count = survives.to(tl.int32)
        index = num_written + tl.cumsum(count, axis=0) - 1
        slot = start + tl.arange(0, TILE)
        tl.store(survivors + index, slot, mask=survives & (index < num_survivors))
        num_written += tl.sum(count, axis=0)


@triton.jit(do_not_specialize=["num_chunks", "table_stride", "max_survivors"])
def pack_survivors(
    key_bases,  # [L], int64
    value_bases,
    old_score_bases,  # of those that are ranked
    score_bases,  # of those in the pages; the same, in place
    position_bases,
    without_bases,  # of scores without the observation window; read where KEEPS
    block_table_ptr,
    new_table_ptr,
    fields_ptr,
    survivors_ptr,
    key_type,  # any tensor of the cache's dtype
    page_stride,
    word_stride,
    table_stride,
    num_chunks,
    rows_per_block,
    max_survivors,
    N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
    APART: tl.constexpr,
    KEEPS: tl.constexpr,
):
    """Move the survivors of (layer, chunk, KV head) into slots [0, num_survivors).

    Where heads share slots, ``share.move_shared`` does.
    """
    h, r, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_survivors = tl.load(fields_ptr + r + NUM_SURVIVORS * num_chunks)
    if tl.load(fields_ptr + r + SPLITS * num_chunks) != 0:
        return
    block_table = block_table_ptr + r.to(tl.int64) * table_stride
    # What the compiler knows of an argument, and not of an address that is read: whole vectors.
    keys = tl.multiple_of(tl.load(key_bases + layer).to(key_type.dtype), ALIGNED)
    values = tl.multiple_of(tl.load(value_bases + layer).to(key_type.dtype), ALIGNED)
    old_scores = tl.load(old_score_bases + layer).to(tl.pointer_type(tl.float32))
    scores = tl.load(score_bases + layer).to(tl.pointer_type(tl.float32))
    positions = tl.load(position_bases + layer).to(tl.pointer_type(tl.int32))
    new_table = new_table_ptr + r.to(tl.int64) * table_stride
    attended_len = tl.load(fields_ptr + r + ATTENDED_LEN * num_chunks)
    survivors = survivors_ptr + (
        ((layer * num_chunks + r).to(tl.int64) * tl.num_programs(0) + h) * max_survivors
    )
    dim = tl.arange(0, D_PAD)
    for start in range(0, num_survivors, TILE):
        new_slot = start + tl.arange(0, TILE)
        live = new_slot < num_survivors
        old_slot = tl.load(survivors + new_slot, mask=live, other=0)
        old_row, old_offset = locate(block_table, old_slot, live, h, rows_per_block, N)
        new_row, new_offset = locate(new_table, new_slot, live, h, rows_per_block, N)
        old_kv = kv_offsets(old_row, old_offset, dim, page_stride, D)
        new_kv = kv_offsets(new_row, new_offset, dim, page_stride, D)
        old_word, new_word = old_row * word_stride + old_offset, new_row * word_stride + new_offset
        mask = live[:, None] & (dim < D)[None, :]
        key = tl.load(keys + old_kv, mask=mask)  # [TILE, D_PAD]
        value = tl.load(values + old_kv, mask=mask)  # [TILE, D_PAD]
        score_word = score_at(old_word, old_slot, h, attended_len, APART)
        score = tl.load(old_scores + score_word, mask=live)
        position = tl.load(positions + old_word, mask=live)
        if KEEPS:
            without = tl.load(without_bases + layer).to(tl.pointer_type(tl.float32))
            kept = tl.load(without + old_word, mask=live)
        # Other threads of this program may still read what is written next.
        tl.debug_barrier()
        tl.store(keys + new_kv, key, mask=mask)
        tl.store(values + new_kv, value, mask=mask)
        tl.store(scores + new_word, score, mask=live)
        tl.store(positions + new_word, position, mask=live)
        if KEEPS:
            tl.store(without + new_word, kept, mask=live)
