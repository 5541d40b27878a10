# SPDX-License-Identifier: Apache-2.0
"""One new token for each of B requests: it is stored, and attended to in two launches.

::

    logits[g, j] = scale * q_g . k_j                    attend_split, over splits of the slots
    P[g, j] = exp(logits[g, j] - lse_g); out = P V      score.merge_and_score: the splits merged,
                                                        and an attention sink, if there is one
    score[j] += sum_g P[g, j] ** power; victim = argmin score.merge_and_score, in the same pass

The split that the new token's slot is in stores it first. Where victims are merged, two launches go
before: one finds out where to, the other moves them there; and logits gain the logarithms of
masses: see merge.py.

Raw logits pass through a scratch buffer, one float32 for each query head and slot of the pool, so
no place in it belongs to two requests, and a split's end needs no bookkeeping. They are told to
stay in the device's cache, where the next layer writes over them: memory sees little of them. Twins
of ``reference.attend_and_score`` (arXiv 2306.14048, Algorithm 1).

A long request beside short ones has more splits than they: see ``strips.split_of``. The grid
follows from the batch's shape alone, so that a captured graph keeps it. Programs of padding
(``attended_len`` = 0) write zeros and leave.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_h2o.kernels.triton.strips import (
    ATTENDED_LEN,
    LOGICAL_START,
    SCORES,
    TOKEN,
    new_slot,
    split_of,
    split_size,
    strip_of,
)
from vllm_h2o.kernels.triton.tiles import as_stored, load_slots, page_row, update_softmax


@triton.jit
def store_token(
    key_ptr,
    value_ptr,
    key_pages,
    value_pages,
    score_pages,
    position_pages,
    mass_pages,
    fields,  # the request's
    field_stride,
    row,  # of the new token's slot
    offset,
    h,
    key_factor,
    value_factor,
    key_stride,
    value_stride,
    page_stride,
    word_stride,
    dim,
    D: tl.constexpr,
    MERGES: tl.constexpr,
):
    """Write K, V, position, a score of 0 and mass of a KV head into the new token's slot."""
    token = tl.load(fields + TOKEN * field_stride)
    key = tl.load(key_ptr + token * key_stride + h * D + dim, mask=dim < D)  # [D_PAD]
    value = tl.load(value_ptr + token * value_stride + h * D + dim, mask=dim < D)  # [D_PAD]
    kv = row * page_stride + offset * D + dim
    tl.store(key_pages + kv, as_stored(key, key_factor, key_pages), mask=dim < D)
    tl.store(value_pages + kv, as_stored(value, value_factor, value_pages), mask=dim < D)
    position = tl.load(fields + LOGICAL_START * field_stride).to(tl.int32)
    tl.store(position_pages + row * word_stride + offset, position)
    tl.store(score_pages + row * word_stride + offset, 0.0)
    if MERGES:
        tl.store(mass_pages + row * word_stride + offset, 1.0)


@triton.jit(do_not_specialize=["first_head", "num_requests", "num_kv_splits", "num_spare"])
def attend_split(
    query_ptr,  # [T, Hq, D]
    key_ptr,  # [T, H, D]
    value_ptr,  # [T, H, D]
    key_pages,  # [R, N, D]
    value_pages,  # [R, N, D]
    score_pages,  # [R, N], float32
    position_pages,  # [R, N], int32
    mass_pages,  # [R, N], float32; read and written when MERGES
    block_table_ptr,  # [B, P], int32
    fields_ptr,  # [len(DECODE_FIELDS), B], int64
    victims_ptr,  # [num_blocks, H], int32
    first_rows_ptr,  # [num_blocks, H + 1], int32; read when CAN_SPLIT
    logits_ptr,  # [R, G, N], float32: written
    partial_out_ptr,  # [programs, H, G, D], float32: written, each split's own mean of V
    partial_max_sum_ptr,  # [programs, H, G, 2], float32: written, largest logit and sum of exp
    scale,
    out_scale,  # of V as it is stored
    key_factor,  # of K as it is stored, float8: 1 / scale
    value_factor,
    query_stride, key_stride, value_stride, page_stride, word_stride, table_stride, field_stride,
    request_stride, num_kv_heads, rows_per_block, first_head, num_requests, num_kv_splits,
    num_spare,
    N: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr,
    TILE: tl.constexpr, KEEPS_LOGITS: tl.constexpr, PRECISION: tl.constexpr,
    CAN_SPLIT: tl.constexpr, MERGES: tl.constexpr, MAX_KV_SPLITS: tl.constexpr,
    SPLIT_SLOTS: tl.constexpr,
):  # fmt: skip
    """Attend to one split of (request, KV head), the new token stored in it, if its slot is there.

    G_PAD = 1 multiplies without matrix units.
    """
    h, program = tl.program_id(0), tl.program_id(1)
    b, s, num_splits, _ = split_of(
        fields_ptr, field_stride, request_stride, num_requests, num_kv_splits, num_spare, program,
        MAX_KV_SPLITS, SPLIT_SLOTS,
    )  # fmt: skip
    if b == num_requests:
        return
    fields = fields_ptr + b * request_stride
    if tl.load(fields + ATTENDED_LEN * field_stride) == 0:
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
    token = tl.load(fields + TOKEN * field_stride)
    group, dim = tl.arange(0, G_PAD), tl.arange(0, D_PAD)
    group_mask = (group < G)[:, None] & (dim < D)[None, :]
    query_ptrs = query_ptr + token * query_stride + h * G * D
    if G_PAD == 1:  # of [1, D_PAD] threads of all warps would share each slot's sum
        query = tl.load(query_ptrs + dim, mask=dim < D, other=0.0)  # [D_PAD]
    else:
        query_ptrs += group[:, None] * D + dim[None, :]
        query = tl.load(query_ptrs, mask=group_mask, other=0.0)  # [G_PAD, D_PAD]
    first_block = tl.load(block_table)
    slot_new = new_slot(fields, field_stride, length, victims_ptr, first_block, h, num_kv_heads)
    if (slot_new >= begin) & (slot_new < begin + size):
        row_new = page_row(
            block_table, slot_new // N, slot_new >= 0, first_row, row_step, rows_per_block,
            CAN_SPLIT,
        )  # fmt: skip
        store_token(
            key_ptr, value_ptr, key_pages, value_pages, score_pages, position_pages, mass_pages,
            fields, field_stride, row_new, slot_new % N, h, key_factor, value_factor, key_stride,
            value_stride, page_stride, word_stride, dim, D, MERGES,
        )  # fmt: skip
    # Other threads of this program load what one has stored.
    tl.debug_barrier()
    num_kept = tl.where(tl.load(fields + SCORES * field_stride) != 0, G, 0)
    row_max = tl.full([G_PAD], float("-inf"), tl.float32)
    row_sum = tl.zeros([G_PAD], tl.float32)
    # A single query keeps a sum for each slot of a tile; they are added up at the end.
    out = tl.zeros([TILE if G_PAD == 1 else G_PAD, D_PAD], tl.float32)
    # Said here: Triton loads ahead by itself only where matrix units multiply.
    for start in tl.range(begin, tl.minimum(begin + size, length), TILE, num_stages=3):
        slot = start + tl.arange(0, TILE)
        live, offset = slot < length, slot % N
        row = page_row(block_table, slot // N, live, first_row, row_step, rows_per_block, CAN_SPLIT)
        # Both at once: V is on its way while K is multiplied.
        key = load_slots(key_pages, row, offset, live, dim, page_stride, D)  # [TILE, D_PAD]
        value = load_slots(value_pages, row, offset, live, dim, page_stride, D)  # [TILE, D_PAD]
        key, value = key.to(query.dtype), value.to(query.dtype)  # of float8
        if G_PAD == 1:
            logits = tl.sum(query.to(tl.float32)[None, :] * key.to(tl.float32), axis=1)[None, :]
        else:
            logits = tl.dot(query, tl.trans(key), input_precision=PRECISION)  # [G_PAD, TILE]
        logits = logits * scale
        if MERGES:
            words = row * word_stride + offset
            logits += tl.log(tl.load(mass_pages + words, mask=live, other=1.0))[None, :]
        logits = tl.where(live[None, :], logits, float("-inf"))
        if KEEPS_LOGITS:
            logits_ptrs = logits_ptr + (row * G * N + offset)[None, :] + group[:, None] * N
            kept = (group < num_kept)[:, None] & live[None, :]
            tl.store(logits_ptrs, logits, mask=kept, eviction_policy="evict_last")
        # Each tile begins with a slot in use: no maximum is -inf.
        row_max, row_sum, rescale, probs = update_softmax(row_max, row_sum, logits)
        if G_PAD == 1:
            more = tl.trans(probs) * value.to(tl.float32)  # [TILE, D_PAD]
        else:
            more = tl.dot(probs.to(value.dtype), value, input_precision=PRECISION)  # [G_PAD, D_PAD]
        out = out * rescale[:, None] + more
    if G_PAD == 1:
        out = tl.sum(out, axis=0)[None, :]
    partial = (program * num_kv_heads + h).to(tl.int64) * G + group
    mean = out * out_scale / row_sum[:, None]
    tl.store(partial_out_ptr + partial[:, None] * D + dim[None, :], mean, mask=group_mask)
    tl.store(partial_max_sum_ptr + partial * 2, row_max, mask=group < G)
    tl.store(partial_max_sum_ptr + partial * 2 + 1, row_sum, mask=group < G)
