"""One new token for each of B requests, in two launches after the store.

::

    logits[g, j] = scale * q_g . k_j                    attend_split, over splits of the slots
    P[g, j] = exp(logits[g, j] - lse_g); out = P V      merge_and_score: the splits merged, and
                                                        an attention sink, if there is one
    score[j] += sum_g P[g, j] ** power; victim = argmin merge_and_score, in the same pass

Where victims are merged, a launch before the store finds out where to, and logits gain the
logarithms of masses: see merge.py.

Raw logits pass through a scratch buffer, one float32 for each query head and slot of the pool, so
no place in it belongs to two requests, and a split's end needs no bookkeeping. Twins of
``reference.attend_and_score`` and ``select_victim`` (arXiv 2306.14048, Algorithm 1).

Every request is one row of programs; those of padding (``attended_len`` = 0) write zeros and leave.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_h2o.kernels.triton.merge import take_victim_in
from vllm_h2o.kernels.triton.strips import (
    ATTENDED_LEN,
    IN_PROMPT,
    LOGICAL_START,
    NUM_FREE_SLOTS,
    NUM_SINKS,
    OVERWRITES,
    RECENT_START,
    SCORES,
    SELECTS,
    TOKEN,
    new_slot,
    split_size,
    strip_of,
)
from vllm_h2o.kernels.triton.tiles import as_stored, load_slots, page_row


@triton.jit(do_not_specialize=["num_kv_splits"])
def store_token(
    key_ptr,  # [T, H, D]
    value_ptr,  # [T, H, D]
    initial_score_ptr,  # [T, H], float32; read when HAS_INITIAL_SCORE
    key_pages,  # [R, N, D]
    value_pages,  # [R, N, D]
    score_pages,  # [R, N], float32
    position_pages,  # [R, N], int32
    mass_pages,  # [R, N], float32; read and written when MERGES
    nearest_ptr,  # [B, H, splits, 2], float32: see merge.nearest_key; read when MERGES
    block_table_ptr,  # [B, P], int32
    fields_ptr,  # [len(DECODE_FIELDS), B], int64
    victims_ptr,  # [num_blocks, H], int32
    first_rows_ptr,  # [num_blocks, H + 1], int32; read when CAN_SPLIT
    merge,  # the cosine above which a victim is merged
    key_factor,  # of K as it is stored, float8: 1 / scale
    value_factor,
    key_stride,
    value_stride,
    page_stride,  # of K and V, in elements
    word_stride,  # of scores and positions, in words
    table_stride,
    field_stride,
    request_stride,
    num_kv_heads,
    num_kv_splits,
    N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    MAX_KV_SPLITS: tl.constexpr,
    HAS_INITIAL_SCORE: tl.constexpr,
    CAN_SPLIT: tl.constexpr,
    MERGES: tl.constexpr,
):
    """Write K, V, position and initial score of (request, head) into the new token's slot.

    With MERGES its mass, too; a victim that was there goes to the nearest key before.
    """
    b, h = tl.program_id(0), tl.program_id(1)
    fields = fields_ptr + b * request_stride
    if tl.load(fields + ATTENDED_LEN * field_stride) == 0:
        return
    block_table = block_table_ptr + b.to(tl.int64) * table_stride
    first_row, row_step, length = strip_of(
        fields, field_stride, first_rows_ptr, block_table, h, num_kv_heads, N, CAN_SPLIT
    )
    first_block = tl.load(block_table)
    slot = new_slot(fields, field_stride, length, victims_ptr, first_block, h, num_kv_heads)
    row = page_row(block_table, slot // N, slot >= 0, first_row, row_step, num_kv_heads, CAN_SPLIT)
    offset = slot % N
    token = tl.load(fields + TOKEN * field_stride)
    dim = tl.arange(0, D_PAD)
    if MERGES:
        if tl.load(fields + OVERWRITES * field_stride) != 0:
            num_splits = tl.cdiv(length, split_size(length, num_kv_splits, TILE))
            nearest = nearest_ptr + (b * num_kv_heads + h).to(tl.int64) * num_kv_splits * 2
            take_victim_in(
                key_pages, value_pages, mass_pages, nearest, num_splits, block_table, row, offset,
                merge, first_row, row_step, page_stride, word_stride, num_kv_heads, dim, N, D,
                MAX_KV_SPLITS, CAN_SPLIT,
            )  # fmt: skip
        tl.store(mass_pages + row * word_stride + offset, 1.0)
    key = tl.load(key_ptr + token * key_stride + h * D + dim, mask=dim < D)  # [D_PAD]
    value = tl.load(value_ptr + token * value_stride + h * D + dim, mask=dim < D)  # [D_PAD]
    kv = row * page_stride + offset * D + dim
    tl.store(key_pages + kv, as_stored(key, key_factor, key_pages), mask=dim < D)
    tl.store(value_pages + kv, as_stored(value, value_factor, value_pages), mask=dim < D)
    position = tl.load(fields + LOGICAL_START * field_stride).to(tl.int32)
    tl.store(position_pages + row * word_stride + offset, position)
    score = 0.0
    if HAS_INITIAL_SCORE:
        score = tl.load(initial_score_ptr + token * num_kv_heads + h)
    tl.store(score_pages + row * word_stride + offset, score)


@triton.jit(do_not_specialize=["num_kv_splits"])
def attend_split(
    query_ptr,  # [T, Hq, D]
    key_pages,
    value_pages,
    mass_pages,  # read when MERGES
    block_table_ptr,
    fields_ptr,
    victims_ptr,
    first_rows_ptr,
    logits_ptr,  # [num_blocks, H, G, N], float32: written
    partial_out_ptr,  # [B, H, splits, G, D], float32: written, each split's own mean of V
    partial_max_sum_ptr,  # [B, H, splits, G, 2], float32: written, largest logit and sum of exp
    scale,
    out_scale,  # of V as it is stored
    query_stride,
    page_stride,
    word_stride,
    table_stride,
    field_stride,
    request_stride,
    num_kv_heads,
    num_kv_splits,
    N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    TILE: tl.constexpr,
    HAS_FREE_SLOTS: tl.constexpr,
    KEEPS_LOGITS: tl.constexpr,
    PRECISION: tl.constexpr,
    CAN_SPLIT: tl.constexpr,
    MERGES: tl.constexpr,
):
    """Attend to one split of (request, KV head); G_PAD = 1 multiplies without matrix units."""
    b, h, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = fields_ptr + b * request_stride
    if tl.load(fields + ATTENDED_LEN * field_stride) == 0:
        return
    block_table = block_table_ptr + b.to(tl.int64) * table_stride
    first_row, row_step, length = strip_of(
        fields, field_stride, first_rows_ptr, block_table, h, num_kv_heads, N, CAN_SPLIT
    )
    size = split_size(length, num_kv_splits, TILE)
    begin = s * size
    if begin >= length:
        return
    token = tl.load(fields + TOKEN * field_stride)
    group, dim = tl.arange(0, G_PAD), tl.arange(0, D_PAD)
    group_mask = (group < G)[:, None] & (dim < D)[None, :]
    query_ptrs = query_ptr + token * query_stride + (h * G + group[:, None]) * D + dim[None, :]
    query = tl.load(query_ptrs, mask=group_mask, other=0.0)  # [G_PAD, D_PAD]
    first_block = tl.load(block_table)
    slot_new = new_slot(fields, field_stride, length, victims_ptr, first_block, h, num_kv_heads)
    num_free_slots = tl.load(fields + NUM_FREE_SLOTS * field_stride).to(tl.int32)
    num_kept = tl.where(tl.load(fields + SCORES * field_stride) != 0, G, 0)
    row_max = tl.full([G_PAD], float("-inf"), tl.float32)
    row_sum = tl.zeros([G_PAD], tl.float32)
    # A single query keeps a sum for each slot of a tile; they are added up at the end.
    out = tl.zeros([TILE if G_PAD == 1 else G_PAD, D_PAD], tl.float32)
    # Said here: Triton loads ahead by itself only where matrix units multiply.
    for start in tl.range(begin, tl.minimum(begin + size, length), TILE, num_stages=3):
        slot = start + tl.arange(0, TILE)
        resident, offset = slot < length, slot % N
        row = page_row(
            block_table, slot // N, resident, first_row, row_step, num_kv_heads, CAN_SPLIT
        )
        live = resident
        if HAS_FREE_SLOTS:
            live = live & ((slot <= slot_new) | (slot > slot_new + num_free_slots))
        # Both at once: V is on its way while K is multiplied.
        key = load_slots(key_pages, row, offset, live, dim, page_stride, D)  # [TILE, D_PAD]
        value = load_slots(value_pages, row, offset, live, dim, page_stride, D)  # [TILE, D_PAD]
        key, value = key.to(query.dtype), value.to(query.dtype)  # of float8
        if G_PAD == 1:
            logits = tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1)[None, :]  # [1, TILE]
        else:
            logits = tl.dot(query, tl.trans(key), input_precision=PRECISION)  # [G_PAD, TILE]
        logits = logits * scale
        if MERGES:
            words = row * word_stride + offset
            logits += tl.log(tl.load(mass_pages + words, mask=live, other=1.0))[None, :]
        logits = tl.where(live[None, :], logits, float("-inf"))
        if KEEPS_LOGITS:
            logits_ptrs = logits_ptr + (row * G * N + offset)[None, :] + group[:, None] * N
            tl.store(logits_ptrs, logits, mask=(group < num_kept)[:, None] & resident[None, :])
        new_max = tl.maximum(row_max, tl.max(logits, axis=1))
        # A split may begin with nothing but free slots: exp(-inf - -inf) would be NaN.
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp(row_max - finite_max)
        probs = tl.exp(logits - finite_max[:, None])  # [G_PAD, TILE]
        row_sum = row_sum * rescale + tl.sum(probs, axis=1)
        if G_PAD == 1:
            more = tl.trans(probs) * value.to(tl.float32)  # [TILE, D_PAD]
        else:
            more = tl.dot(probs.to(value.dtype), value, input_precision=PRECISION)  # [G_PAD, D_PAD]
        out = out * rescale[:, None] + more
        row_max = new_max
    if G_PAD == 1:
        out = tl.sum(out, axis=0)[None, :]
    partial = ((b * num_kv_heads + h).to(tl.int64) * num_kv_splits + s) * G + group
    mean = out * out_scale / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    tl.store(partial_out_ptr + partial[:, None] * D + dim[None, :], mean, mask=group_mask)
    tl.store(partial_max_sum_ptr + partial * 2, row_max, mask=group < G)
    tl.store(partial_max_sum_ptr + partial * 2 + 1, row_sum, mask=group < G)


@triton.jit
def merge_splits(
    partial_out_ptr,
    partial_max_sum_ptr,
    sink_ptr,  # [G], of the KV head; read when HAS_SINKS
    partial,  # [G_PAD]: index of the first split of each query head
    num_splits,  # of this request: those with slots
    MAX_KV_SPLITS: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    group,
    dim,
    HAS_SINKS: tl.constexpr,
):
    """The splits' means of V, weighted; and each query head's log-sum-exp of all logits."""
    split = tl.arange(0, MAX_KV_SPLITS)
    live = (split < num_splits)[:, None] & (group < G)[None, :]  # [MAX_KV_SPLITS, G_PAD]
    max_ptrs = partial_max_sum_ptr + (partial[None, :] + split[:, None] * G) * 2
    highest = tl.max(tl.load(max_ptrs, mask=live, other=float("-inf")), axis=0)  # [G_PAD]
    if HAS_SINKS:
        sinks = tl.load(sink_ptr + group, mask=group < G, other=float("-inf"))
        highest = tl.maximum(highest, sinks)
    # Rows of the group's padding have no split: exp(-inf - -inf) would be NaN.
    row_max = tl.where(group < G, highest, 0.0)
    row_sum = tl.zeros(group.shape, tl.float32)
    if HAS_SINKS:
        row_sum = tl.exp(sinks - row_max)
    out = tl.zeros([group.shape[0], dim.shape[0]], tl.float32)
    group_mask = (group < G)[:, None] & (dim < D)[None, :]
    for s in range(num_splits):
        index = partial + s * G
        split_max = tl.load(partial_max_sum_ptr + index * 2, mask=group < G, other=0.0)
        split_sum = tl.load(partial_max_sum_ptr + index * 2 + 1, mask=group < G, other=1.0)
        weight = tl.exp(split_max - row_max) * split_sum
        mean_ptrs = partial_out_ptr + index[:, None] * D + dim[None, :]
        mean = tl.load(mean_ptrs, mask=group_mask, other=0.0)  # [G_PAD, D_PAD]
        out += weight[:, None] * mean
        row_sum += weight
    return out / row_sum[:, None], row_max + tl.log(row_sum)


@triton.jit(do_not_specialize=["num_kv_splits", "skip_recent"])
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
    out_stride,
    word_stride,
    table_stride,
    field_stride,
    request_stride,
    num_kv_heads,
    num_kv_splits,
    skip_recent,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    TILE: tl.constexpr,
    MAX_KV_SPLITS: tl.constexpr,
    PAGES: tl.constexpr,
    POWER: tl.constexpr,
    BY_PAGE: tl.constexpr,
    BY_AGE: tl.constexpr,
    BY_MAXIMUM: tl.constexpr,
    CAN_SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the splits of (request, KV head), add to scores, and find the next victim."""
    b, h = tl.program_id(0), tl.program_id(1)
    fields = fields_ptr + b * request_stride
    token = tl.load(fields + TOKEN * field_stride)
    group, dim = tl.arange(0, G_PAD), tl.arange(0, D_PAD)
    out_ptrs = out_ptr + token * out_stride + (h * G + group[:, None]) * D + dim[None, :]
    group_mask = (group < G)[:, None] & (dim < D)[None, :]
    if tl.load(fields + ATTENDED_LEN * field_stride) == 0:
        tl.store(out_ptrs, tl.zeros([G_PAD, D_PAD], out_ptr.dtype.element_ty), mask=group_mask)
        return
    block_table = block_table_ptr + b.to(tl.int64) * table_stride
    first_row, row_step, length = strip_of(
        fields, field_stride, first_rows_ptr, block_table, h, num_kv_heads, N, CAN_SPLIT
    )
    num_splits = tl.cdiv(length, split_size(length, num_kv_splits, TILE))
    partial = (b * num_kv_heads + h).to(tl.int64) * num_kv_splits * G + group
    out, lse = merge_splits(
        partial_out_ptr, partial_max_sum_ptr, sink_ptr + h * G, partial, num_splits,
        MAX_KV_SPLITS, D, G, group, dim, HAS_SINKS,
    )  # fmt: skip
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=group_mask)
    selects = tl.load(fields + SELECTS * field_stride) != 0
    scores = tl.load(fields + SCORES * field_stride) != 0
    in_prompt = tl.load(fields + IN_PROMPT * field_stride) != 0
    # A query that scores nothing is one that no token is old enough for.
    min_age = tl.where(scores, skip_recent, 1 << 30)
    if ((POWER > 0) & scores) | selects:
        query_position = tl.load(fields + LOGICAL_START * field_stride).to(tl.int32)
        recent_start = tl.load(fields + RECENT_START * field_stride).to(tl.int32)
        num_sinks = tl.load(fields + NUM_SINKS * field_stride)
        offset = tl.arange(0, N_PAD)
        # Running minima, each in its own lane: lowest score, of equals the newest, and its slot.
        lanes: tl.constexpr = PAGES if BY_PAGE else PAGES * N_PAD
        lowest = tl.full([lanes], float("inf"), tl.float32)
        newest = tl.full([lanes], -1, tl.int32)
        lowest_slot = tl.zeros([lanes], tl.int32)
        for start in range(0, tl.cdiv(length, N), PAGES):
            page = start + tl.arange(0, PAGES)
            slot = page[:, None] * N + offset[None, :]  # [PAGES, N_PAD]
            live = (slot < length) & (offset < N)[None, :]
            row = page_row(
                block_table, page, page * N < length, first_row, row_step, num_kv_heads, CAN_SPLIT
            )
            words = row[:, None] * word_stride + offset[None, :]
            position = tl.load(position_pages + words, mask=live, other=-1)  # [PAGES, N_PAD]
            score = tl.load(score_pages + words, mask=live, other=0.0)  # [PAGES, N_PAD]
            if POWER > 0:
                contributions = tl.zeros([PAGES, N_PAD], tl.float32)
                largest = tl.zeros([PAGES, N_PAD], tl.float32)
                for g in tl.static_range(G):
                    logits_ptrs = logits_ptr + ((row * G + g) * N)[:, None] + offset[None, :]
                    logits = tl.load(logits_ptrs, mask=live, other=float("-inf"))
                    probs = tl.exp(logits - tl.sum(tl.where(group == g, lse, 0.0)))
                    contributions += probs if POWER == 1 else probs * probs
                    largest = tl.maximum(largest, probs if POWER == 1 else probs * probs)
                adds = live & (query_position - position >= min_age)
                largest = tl.where(adds, tl.maximum(score, largest), score)
                score += tl.where(adds, contributions, 0.0)
                if BY_MAXIMUM:
                    score = tl.where(in_prompt, largest, score)
                tl.store(score_pages + words, score, mask=adds)
            if BY_AGE:
                score = score / tl.maximum(query_position + 1 - position, 1)
            candidate = live & (position < recent_start) & (position >= num_sinks)
            if BY_PAGE:
                whole = tl.sum((candidate | (offset >= N)[None, :]).to(tl.int32), axis=1) == N_PAD
                ranked = tl.where(whole, tl.sum(score, axis=1), float("inf"))
                # Of a page, the first slot's position.
                ranked_position = tl.sum(tl.where((offset == 0)[None, :], position, 0), axis=1)
                ranked_slot = page * N
            else:
                whole = tl.reshape(candidate, [lanes])
                ranked = tl.where(whole, tl.reshape(score, [lanes]), float("inf"))
                ranked_position = tl.reshape(position, [lanes])
                ranked_slot = tl.reshape(slot, [lanes])
            better = whole & ((ranked < lowest) | ((ranked == lowest) & (ranked_position > newest)))
            lowest = tl.where(better, ranked, lowest)
            newest = tl.where(better, ranked_position, newest)
            lowest_slot = tl.where(better, ranked_slot, lowest_slot)
        if selects:
            equal = lowest == tl.min(lowest, axis=0)
            equal = equal & (newest == tl.max(tl.where(equal, newest, -1), axis=0))
            victim_ptr = victims_ptr + tl.load(block_table).to(tl.int64) * num_kv_heads + h
            tl.store(victim_ptr, tl.max(tl.where(equal, lowest_slot, 0), axis=0))
