# SPDX-License-Identifier: Apache-2.0
"""After attention: splits merged, scores added to, and the slot that the next token will take.

Twins of ``reference.attend_and_score`` and ``select_victim`` (arXiv 2306.14048, Algorithm 1). The
pages of a strip are divided among programs, each of which finds a candidate of its own; the one
that comes last chooses among them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_h2o.kernels.triton.strips import (
    ATTENDED_LEN,
    LOGICAL_START,
    NUM_SINKS,
    RECENT_START,
    SCORES,
    SELECTS,
    TOKEN,
    program_of,
    split_of,
    split_size,
    strip_of,
)
from vllm_h2o.kernels.triton.tiles import page_row


@triton.jit
def lse_of_splits(
    max_sum_ptrs,  # [MAX_KV_SPLITS, G_PAD]
    live,  # the same shape
    sink_ptr,  # [G], of the KV head; read when HAS_SINKS
    group,
    G: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Each query head's log-sum-exp of all logits, [G_PAD]."""
    largest = tl.load(max_sum_ptrs, mask=live, other=float("-inf"))
    sums = tl.load(max_sum_ptrs + 1, mask=live, other=0.0)
    row_max = tl.max(largest, axis=0)
    if HAS_SINKS:
        sinks = tl.load(sink_ptr + group, mask=group < G, other=float("-inf"))
        row_max = tl.maximum(row_max, sinks)
    # Rows of the group's padding have no split: exp(-inf - -inf) would be NaN.
    row_max = tl.where(group < G, row_max, 0.0)
    row_sum = tl.sum(tl.exp(largest - row_max[None, :]) * sums, axis=0)
    if HAS_SINKS:
        row_sum += tl.exp(sinks - row_max)
    return row_max + tl.log(tl.where(group < G, row_sum, 1.0))


@triton.jit
def merge_splits(
    outs,  # [G, D], of the KV head: some written
    partials,  # [MAX_KV_SPLITS]: index of each split's first query head
    num_splits,  # of this request: those with slots
    partial_out_ptr,
    partial_max_sum_ptr,
    sink_ptr,
    part,  # of the programs that divide the query heads among them
    num_parts,
    group,
    dim,
    D: tl.constexpr,
    G: tl.constexpr,
    MAX_KV_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Write the splits' means of V, weighted; the log-sum-exp of each query head, [G_PAD]."""
    split = tl.arange(0, MAX_KV_SPLITS)
    live = split < num_splits
    lse = lse_of_splits(
        partial_max_sum_ptr + (partials[:, None] + group[None, :]) * 2,
        live[:, None] & (group < G)[None, :], sink_ptr, group, G, HAS_SINKS,
    )  # fmt: skip
    for head in range(part, G, num_parts):
        max_sum_ptrs = partial_max_sum_ptr + (partials + head) * 2
        largest = tl.load(max_sum_ptrs, mask=live, other=float("-inf"))
        sums = tl.load(max_sum_ptrs + 1, mask=live, other=0.0)
        weight = tl.exp(largest - tl.sum(tl.where(group == head, lse, 0.0), axis=0)) * sums
        mean_ptrs = partial_out_ptr + (partials + head)[:, None] * D + dim[None, :]
        mask = live[:, None] & (dim < D)[None, :]
        mean = tl.load(mean_ptrs, mask=mask, other=0.0)  # [MAX_KV_SPLITS, D_PAD]
        out = tl.sum(weight[:, None] * mean, axis=0)
        tl.store(outs + head * D + dim, out.to(outs.dtype.element_ty), mask=dim < D)
    return lse


@triton.jit
def best_of(lowest, newest, slot):
    """Choose among candidates the lowest score, of equals the newest position; and its slot."""
    least = tl.min(lowest, axis=0)
    latest = tl.max(tl.where(lowest == least, newest, -1), axis=0)
    is_it = (lowest == least) & (newest == latest)
    return least, latest, tl.max(tl.where(is_it, slot, 0), axis=0)


@triton.jit
def elect(
    victim_ptr,
    lowest,
    newest,
    slot,
    lowest_ptr,  # [programs, H], float32
    newest_ptr,  # [programs, H, 2], int32
    arrived_ptr,  # int32, of this strip, 0 before and after
    own,  # index of this program's candidate
    every,  # [MAX_KV_SPLITS]: those of the parts
    part,  # [MAX_KV_SPLITS]
    num_parts,  # that arrive
):
    """Leave a candidate; the last of all programs to do so writes the victim."""
    if num_parts == 1:
        tl.store(victim_ptr, slot)
    else:
        tl.store(lowest_ptr + own, lowest)
        tl.store(newest_ptr + own * 2, newest)
        tl.store(newest_ptr + own * 2 + 1, slot)
        # All threads' stores come before the one that counts; it releases, and acquires.
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == num_parts - 1:
            came = part < num_parts
            # Not from this multiprocessor's own cache.
            lows = tl.load(lowest_ptr + every, mask=came, other=float("inf"), cache_modifier=".cg")
            news = tl.load(newest_ptr + every * 2, mask=came, other=-1, cache_modifier=".cg")
            slots = tl.load(newest_ptr + every * 2 + 1, mask=came, other=0, cache_modifier=".cg")
            _, _, chosen = best_of(lows, news, slots)
            tl.store(victim_ptr, chosen)
            tl.store(arrived_ptr, 0)


@triton.jit(do_not_specialize=["first_head", "num_requests", "num_kv_splits", "num_spare"])
def merge_and_score(
    out_ptr,  # [T, Hq, D]: written
    score_pages,  # written
    position_pages,
    block_table_ptr,
    fields_ptr,
    victims_ptr,  # written where a request selects
    first_rows_ptr,
    sink_ptr,  # [Hq], float32; read when HAS_SINKS
    logits_ptr,
    partial_out_ptr,
    partial_max_sum_ptr,
    lowest_ptr,  # [programs, H], float32: their candidates, see elect
    newest_ptr,  # [programs, H, 2], int32: positions and slots of these
    arrived_ptr,  # [B, H], int32
    out_stride, word_stride, table_stride, field_stride, request_stride, num_kv_heads,
    rows_per_block, first_head, num_requests, num_kv_splits, num_spare,
    N: tl.constexpr, N_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, G: tl.constexpr,
    G_PAD: tl.constexpr, TILE: tl.constexpr, MAX_KV_SPLITS: tl.constexpr, PARTS: tl.constexpr,
    CUTS: tl.constexpr, POWER: tl.constexpr, BY_AGE: tl.constexpr, CAN_SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr, SPLIT_SLOTS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of (request, KV head), add to scores, and find the next victim.

    Each program merges some of the group's query heads, and scores some of the pages: PARTS parts
    at once, of which a page has CUTS, each of N_PAD slots. A request has as many programs as
    splits, or fewer where none is long (``num_spare`` = 0).
    """
    h, program = tl.program_id(0), tl.program_id(1)
    num_kv_parts = (tl.num_programs(1) - num_spare) // num_requests
    b, part, num_parts, first = split_of(
        fields_ptr, field_stride, request_stride, num_requests, num_kv_parts, num_spare, program,
        MAX_KV_SPLITS, SPLIT_SLOTS,
    )  # fmt: skip
    if b == num_requests:
        return
    fields = fields_ptr + b * request_stride
    token = tl.load(fields + TOKEN * field_stride)
    dim = tl.arange(0, D_PAD)
    outs = out_ptr + token * out_stride + h * G * D
    if tl.load(fields + ATTENDED_LEN * field_stride) == 0:
        for head in range(part, G, num_parts):
            zeros = tl.zeros([D_PAD], out_ptr.dtype.element_ty)
            tl.store(outs + head * D + dim, zeros, mask=dim < D)
        return
    block_table = block_table_ptr + b.to(tl.int64) * table_stride
    first_row, row_step, length = strip_of(
        fields, field_stride, first_rows_ptr, block_table, h, num_kv_heads, rows_per_block,
        first_head, N, CAN_SPLIT,
    )  # fmt: skip
    num_splits = num_kv_splits + num_parts - num_kv_parts
    num_splits = tl.cdiv(length, split_size(length, num_splits, TILE))
    split, group = tl.arange(0, MAX_KV_SPLITS), tl.arange(0, G_PAD)
    partials = program_of(b, split, first, num_kv_splits, num_spare) * num_kv_heads + h
    lse = merge_splits(
        outs, partials * G, num_splits, partial_out_ptr, partial_max_sum_ptr,
        sink_ptr + h * G, part, num_parts, group, dim, D, G, MAX_KV_SPLITS, HAS_SINKS,
    )  # fmt: skip
    selects = tl.load(fields + SELECTS * field_stride) != 0
    scores = tl.load(fields + SCORES * field_stride) != 0
    num_scored = tl.where(scores, length, 0)
    parts = tl.cdiv(length, N) * CUTS
    num_own = tl.cdiv(tl.cdiv(parts, PARTS), num_parts) * PARTS  # of this program
    begin = part * num_own
    if (((POWER > 0) & scores) | selects) & (begin < parts):
        query_position = tl.load(fields + LOGICAL_START * field_stride).to(tl.int32)
        recent_start = tl.load(fields + RECENT_START * field_stride).to(tl.int32)
        num_sinks = tl.load(fields + NUM_SINKS * field_stride)
        # Running minima, each in its own lane: lowest score, of equals the newest, and its slot.
        lanes: tl.constexpr = PARTS * N_PAD
        lowest = tl.full([lanes], float("inf"), tl.float32)
        newest = tl.full([lanes], -1, tl.int32)
        lowest_slot = tl.zeros([lanes], tl.int32)
        for start in range(begin, tl.minimum(begin + num_own, parts), PARTS):
            at = start + tl.arange(0, PARTS)
            page = at // CUTS
            offset = (at % CUTS * N_PAD)[:, None] + tl.arange(0, N_PAD)[None, :]
            slot = page[:, None] * N + offset  # [PARTS, N_PAD]
            live = (slot < length) & (offset < N)
            row = page_row(
                block_table, page, page * N < length, first_row, row_step, rows_per_block, CAN_SPLIT
            )
            words = row[:, None] * word_stride + offset
            position = tl.load(position_pages + words, mask=live, other=-1)  # [PARTS, N_PAD]
            score = tl.load(score_pages + words, mask=live, other=0.0)  # [PARTS, N_PAD]
            if POWER > 0:
                adds = live & (slot < num_scored)
                contributions = tl.zeros([PARTS, N_PAD], tl.float32)
                for g in tl.static_range(G):
                    logits_ptrs = logits_ptr + ((row * G + g) * N)[:, None] + offset
                    logits = tl.load(
                        logits_ptrs, mask=adds, other=float("-inf"), eviction_policy="evict_last"
                    )
                    probs = tl.exp(logits - tl.sum(tl.where(group == g, lse, 0.0)))
                    contributions += probs if POWER == 1 else probs * probs
                score += contributions
                tl.store(score_pages + words, score, mask=adds)
            if BY_AGE:
                score = score / tl.maximum(query_position + 1 - position, 1)
            candidate = live & (position < recent_start) & (position >= num_sinks)
            ranked = tl.reshape(tl.where(candidate, score, float("inf")), [lanes])
            candidate, position = tl.reshape(candidate, [lanes]), tl.reshape(position, [lanes])
            better = (ranked < lowest) | ((ranked == lowest) & (position > newest))
            better = better & candidate
            lowest = tl.where(better, ranked, lowest)
            newest = tl.where(better, position, newest)
            lowest_slot = tl.where(better, tl.reshape(slot, [lanes]), lowest_slot)
        if selects:
            least, latest, least_slot = best_of(lowest, newest, lowest_slot)
            every = program_of(b, split, first, num_kv_parts, num_spare) * num_kv_heads + h
            elect(
                victims_ptr + tl.load(block_table).to(tl.int64) * num_kv_heads + h,
                least, latest, least_slot, lowest_ptr, newest_ptr,
                arrived_ptr + b * num_kv_heads + h, program * num_kv_heads + h, every, split,
                tl.cdiv(parts, num_own),
            )  # fmt: skip
