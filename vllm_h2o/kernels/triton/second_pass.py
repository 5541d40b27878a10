"""Second-pass scoring: a prompt's queries once more, from positions past its end.

::

    lse_g[i] = log sum_j exp(scale * q'_g[i] . k[j])                                log_sum_exp
    sums[j] = sum_{i, g} exp(scale * q'_g[i] . k[j] - lse_g[i]) ** power            weighted_scores
    score[j] += SECOND_PASS_WEIGHT * age[j] / logical_end * sums[j]                 weighted_scores

Twins of ``reference.score_second_pass``: every rotated query q' sees every token up to the chunk's
end, its own and later ones too. Probabilities are not kept, but computed twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_h2o.kernels.batch import SECOND_PASS_WEIGHT
from vllm_h2o.kernels.triton.prefill import (
    FIRST_SCORING_QUERY,
    LOGICAL_START,
    NUM_TOKENS,
    RESIDENT_START,
    TOKEN_START,
)
from vllm_h2o.kernels.triton.tiles import (
    contributions,
    load_head,
    load_slots,
    locate,
    update_softmax,
)

WEIGHT = tl.constexpr(SECOND_PASS_WEIGHT)


@triton.jit(do_not_specialize=["num_chunks", "table_stride", "lse_stride"])
def log_sum_exp(
    query_ptr,  # [T, Hq, D]: rotated
    key_pages,
    block_table_ptr,  # [R, P], int32
    fields_ptr,  # [len(CHUNK_FIELDS), R], int32
    lse_ptr,  # [Hq, T], float32: written
    scale,
    query_stride,
    lse_stride,
    page_stride,
    table_stride,
    num_chunks,
    num_kv_heads,
    N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    G: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of TILE_Q queries of (chunk, query head), over all slots up to the chunk's end."""
    t, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = fields_ptr + r
    num_tokens = tl.load(fields + NUM_TOKENS * num_chunks)
    first_scoring_query = tl.load(fields + FIRST_SCORING_QUERY * num_chunks)
    if t * TILE_Q >= num_tokens or (t + 1) * TILE_Q <= first_scoring_query:
        return
    i = t * TILE_Q + tl.arange(0, TILE_Q)
    query_mask = i < num_tokens
    token = (tl.load(fields + TOKEN_START * num_chunks) + i).to(tl.int64)
    dim = tl.arange(0, D_PAD)
    query = load_head(query_ptr, token, query_mask, head, dim, query_stride, D)  # [TILE_Q, D_PAD]
    block_table = block_table_ptr + r.to(tl.int64) * table_stride
    row_max = tl.full([TILE_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_Q], tl.float32)
    attended_len = tl.load(fields + RESIDENT_START * num_chunks) + num_tokens
    for start in range(0, attended_len, TILE_K):
        slot = start + tl.arange(0, TILE_K)
        live = slot < attended_len
        row, offset = locate(block_table, slot, live, head // G, num_kv_heads, N)
        key = load_slots(key_pages, row, offset, live, dim, page_stride, D)  # [TILE_K, D_PAD]
        logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale  # [TILE_Q, TILE_K]
        logits = tl.where(live[None, :], logits, float("-inf"))
        row_max, row_sum, _, _ = update_softmax(row_max, row_sum, logits)
    tl.store(lse_ptr + head * lse_stride + token, row_max + tl.log(row_sum), mask=query_mask)


@triton.jit(do_not_specialize=["num_chunks", "table_stride", "lse_stride"])
def weighted_scores(
    query_ptr,  # [T, Hq, D]: rotated
    key_pages,
    score_pages,  # written
    position_pages,
    block_table_ptr,
    fields_ptr,
    lse_ptr,  # [Hq, T], float32
    scale,
    query_stride,
    lse_stride,
    page_stride,
    word_stride,
    table_stride,
    num_chunks,
    num_kv_heads,
    N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    G: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    POWER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the scoring queries' contributions to the scores of TILE_K slots of (chunk, KV head)."""
    t, h, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = fields_ptr + r
    num_tokens = tl.load(fields + NUM_TOKENS * num_chunks)
    attended_len = tl.load(fields + RESIDENT_START * num_chunks) + num_tokens
    if t * TILE_K >= attended_len:
        return
    slot = t * TILE_K + tl.arange(0, TILE_K)
    live = slot < attended_len
    block_table = block_table_ptr + r.to(tl.int64) * table_stride
    row, offset = locate(block_table, slot, live, h, num_kv_heads, N)
    dim = tl.arange(0, D_PAD)
    key = load_slots(key_pages, row, offset, live, dim, page_stride, D)  # [TILE_K, D_PAD]
    words = row * word_stride + offset
    position = tl.load(position_pages + words, mask=live, other=0)
    token_start = tl.load(fields + TOKEN_START * num_chunks).to(tl.int64)
    first_scoring_query = tl.load(fields + FIRST_SCORING_QUERY * num_chunks)
    column_sums = tl.zeros([TILE_K], tl.float32)
    # A query head is not unrolled: each would have buffers of its own for the loads in flight.
    for g in range(G):
        head = h * G + g
        for start in range(first_scoring_query // TILE_Q * TILE_Q, num_tokens, TILE_Q):
            i = start + tl.arange(0, TILE_Q)
            query_mask = (i < num_tokens) & (i >= first_scoring_query)
            token = token_start + i
            query = load_head(query_ptr, token, query_mask, head, dim, query_stride, D)
            lse = tl.load(lse_ptr + head * lse_stride + token, mask=query_mask, other=0.0)
            adds = query_mask[None, :] & live[:, None]  # [TILE_K, TILE_Q]
            column_sums += contributions(key, query, lse, adds, scale, POWER, False, PRECISION)
    logical_end = tl.load(fields + LOGICAL_START * num_chunks) + num_tokens
    weighted = column_sums * WEIGHT * (logical_end - position).to(tl.float32) / logical_end
    score = tl.load(score_pages + words, mask=live, other=0.0)
    tl.store(score_pages + words, score + weighted, mask=live)
