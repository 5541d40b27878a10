"""Queries of a prompt that score once more: a second pass, or the observation window's.

::

    lse_g[i] = log sum_j exp(scale * q_g[i] . k[j])                                 log_sum_exp
    column[j] = sum_{i, g} exp(scale * q_g[i] . k[j] - lse_g[i]) ** power / n       weighted_scores
    or, BY_MAXIMUM, the largest of those, of j and of REACH positions before it
    score[j] += weight * age[j] * column[j]                                         weighted_scores

Twins of ``reference.score_pass``: a rotated query sees every token of its chunk's table, its own
and later ones too; others see those up to their own. Probabilities are computed twice, not kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_h2o.kernels.triton.prefill import (
    FIRST_SCORED_SLOT,
    FIRST_SCORING_QUERY,
    FIRST_WINDOW_QUERY,
    LOGICAL_START,
    NUM_TOKENS,
    RESIDENT_START,
    TOKEN_START,
)
from vllm_h2o.kernels.triton.tiles import (
    add_columns,
    begin_softmax,
    load_head,
    load_slots,
    locate,
    update_softmax,
)


@triton.jit(do_not_specialize=["num_chunks", "table_stride", "first_head", "lse_stride"])
def log_sum_exp(
    query_ptr,  # [T, Hq, D]
    key_pages,
    block_table_ptr,  # [R, P], int32
    fields_ptr,  # [len(CHUNK_FIELDS), R], int32
    sink_ptr,  # [Hq], float32; read when HAS_SINKS
    lse_ptr,  # [Hq, T], float32: written
    scale,
    query_stride,
    lse_stride,
    page_stride,
    table_stride,
    num_chunks,
    rows_per_block,
    first_head,
    N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    G: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    ROTATED: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Of TILE_Q queries of (chunk, query head), over the slots that they see."""
    head, r, t = tl.program_id(0), tl.program_id(1), tl.num_programs(2) - 1 - tl.program_id(2)
    fields = fields_ptr + r
    num_tokens = tl.load(fields + NUM_TOKENS * num_chunks)
    first_query = tl.load(
        fields + (FIRST_SCORING_QUERY if ROTATED else FIRST_WINDOW_QUERY) * num_chunks
    )
    if t * TILE_Q >= num_tokens or (t + 1) * TILE_Q <= first_query:
        return
    i = t * TILE_Q + tl.arange(0, TILE_Q)
    query_mask = i < num_tokens
    token = (tl.load(fields + TOKEN_START * num_chunks) + i).to(tl.int64)
    dim = tl.arange(0, D_PAD)
    query = load_head(query_ptr, token, query_mask, head, dim, query_stride, D)  # [TILE_Q, D_PAD]
    block_table = block_table_ptr + r.to(tl.int64) * table_stride
    row_max, row_sum = begin_softmax(sink_ptr, head, TILE_Q, HAS_SINKS)
    resident_start = tl.load(fields + RESIDENT_START * num_chunks)
    visible = resident_start + num_tokens
    if not ROTATED:
        visible = resident_start + tl.minimum((t + 1) * TILE_Q, num_tokens)
    for start in range(0, visible, TILE_K):
        slot = start + tl.arange(0, TILE_K)
        live = slot < visible
        row, offset = locate(block_table, slot, live, first_head + head // G, rows_per_block, N)
        key = load_slots(key_pages, row, offset, live, dim, page_stride, D).to(query.dtype)
        logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale  # [TILE_Q, TILE_K]
        seen = live[None, :]
        if not ROTATED:
            seen = seen & (slot[None, :] <= (resident_start + i)[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        # The first tile holds slot 0, which every query sees: no maximum is -inf.
        row_max, row_sum, _, _ = update_softmax(row_max, row_sum, logits)
    tl.store(lse_ptr + head * lse_stride + token, row_max + tl.log(row_sum), mask=query_mask)


@triton.jit(
    do_not_specialize=["num_chunks", "table_stride", "first_head", "lse_stride", "skip_recent"]
)
def weighted_scores(
    query_ptr,  # [T, Hq, D]
    key_pages,
    score_pages,  # written
    position_pages,
    block_table_ptr,
    fields_ptr,
    lse_ptr,  # [Hq, T], float32
    scale,
    weight,
    query_stride,
    lse_stride,
    page_stride,
    word_stride,
    table_stride,
    num_chunks,
    rows_per_block,
    first_head,
    skip_recent,
    N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    G: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    POWER: tl.constexpr,
    ROTATED: tl.constexpr,
    BY_MAXIMUM: tl.constexpr,
    REACH: tl.constexpr,
    SKIPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the queries' contributions to the scores of TILE_K - REACH slots of (chunk, KV head).

    A tile begins REACH slots before those, with the ones that reach them.
    """
    h, r, t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = fields_ptr + r
    num_tokens = tl.load(fields + NUM_TOKENS * num_chunks)
    resident_start = tl.load(fields + RESIDENT_START * num_chunks)
    attended_len = resident_start + num_tokens
    first_query = tl.load(
        fields + (FIRST_SCORING_QUERY if ROTATED else FIRST_WINDOW_QUERY) * num_chunks
    )
    first_slot = t * (TILE_K - REACH)
    if first_slot >= attended_len or first_query >= num_tokens:
        return
    slot = first_slot - REACH + tl.arange(0, TILE_K)
    live = (slot >= 0) & (slot < attended_len)
    block_table = block_table_ptr + r.to(tl.int64) * table_stride
    row, offset = locate(block_table, slot, live, first_head + h, rows_per_block, N)
    dim = tl.arange(0, D_PAD)
    key = load_slots(key_pages, row, offset, live, dim, page_stride, D)  # [TILE_K, D_PAD]
    key = key.to(query_ptr.dtype.element_ty)
    words = row * word_stride + offset
    position = tl.load(position_pages + words, mask=live, other=0)
    token_start = tl.load(fields + TOKEN_START * num_chunks).to(tl.int64)
    logical_start = tl.load(fields + LOGICAL_START * num_chunks)
    columns = tl.zeros([TILE_K], tl.float32)
    first = tl.maximum(slot * 0 if ROTATED else slot - resident_start, first_query)
    if SKIPS:
        first = tl.maximum(first, position + skip_recent - logical_start)
    # A query head is not unrolled: each would have buffers of its own for the loads in flight.
    for g in range(G):
        head = h * G + g
        columns = add_columns(
            columns, key, first, first_query // TILE_Q * TILE_Q, num_tokens, query_ptr,
            lse_ptr + head * lse_stride, token_start, head, dim, query_stride, scale, D, TILE_Q,
            POWER, BY_MAXIMUM, PRECISION,
        )  # fmt: skip
    logical_end = logical_start + num_tokens
    if REACH > 0:
        distance = position[:, None] - position[None, :]  # [TILE_K, TILE_K]
        near = live[None, :] & (distance >= 0) & (distance <= REACH)
        columns = tl.max(tl.where(near, columns[None, :], 0.0), axis=1)
    if not BY_MAXIMUM:
        columns = columns / logical_end
    weighted = columns * weight * (logical_end - position).to(tl.float32)
    first_scored_slot = tl.load(fields + FIRST_SCORED_SLOT * num_chunks)
    own = live & (slot >= first_slot) & (slot >= first_scored_slot)
    score = tl.load(score_pages + words, mask=own, other=0.0)
    tl.store(score_pages + words, score + weighted, mask=own)
