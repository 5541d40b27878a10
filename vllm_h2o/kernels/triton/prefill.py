# SPDX-License-Identifier: Apache-2.0
"""Chunks of prompts: store, attend causally, and add the terms of a ranking to scores.

::

    lse_g[i] = log sum_{j that i sees} exp(scale * q_g[i] . k[j])                   attend
               with e^sink_g in the sum, where there are attention sinks
    P_g[i, j] = exp(scale * q_g[i] . k[j] - lse_g[i])
    value[j] = sum_{i, g} P_g[i, j] ** power, or max_{i, g} of the same,            column_scores
               then the largest of value[j - d], 0 <= d <= reach, by position
    score[j] += weight * (age[j] if by_age else 1) * value[j]                       column_scores

Twins of ``reference.attend_and_score`` (arXiv 2306.14048, Algorithm 1) and ``score_term``: what
every query of a prompt pays is the term with weight 1 and no age. Keys are read from the pages,
those of the chunk too. FlashAttention may take the place of ``attend`` where the output is written.
Probabilities are computed twice, not kept: in ``column_scores`` each tile of keys belongs to one
program, which walks the queries that see it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_h2o.kernels.rope import Rope
from vllm_h2o.kernels.triton.tiles import (
    add_columns,
    as_stored,
    begin_softmax,
    kv_offsets,
    load_head,
    load_slots,
    locate,
    rotated,
    update_softmax,
)
from vllm_h2o.policy import Term

CHUNK_FIELDS = (
    "tokens.start",
    "num_tokens",
    "resident_start",
    "logical_start",
    "first_scoring_query",
    "first_window_query",
    "first_scored_slot",
    "shift",
)
"""Attributes of PromptChunk: rows of ``fields_ptr``, [len(CHUNK_FIELDS), R] int32."""
TOKEN_START = tl.constexpr(CHUNK_FIELDS.index("tokens.start"))
NUM_TOKENS = tl.constexpr(CHUNK_FIELDS.index("num_tokens"))
RESIDENT_START = tl.constexpr(CHUNK_FIELDS.index("resident_start"))
LOGICAL_START = tl.constexpr(CHUNK_FIELDS.index("logical_start"))
FIRST_SCORED_SLOT = tl.constexpr(CHUNK_FIELDS.index("first_scored_slot"))
SHIFT = tl.constexpr(CHUNK_FIELDS.index("shift"))


def asked(term: Term | None) -> dict[str, int]:
    """Name the queries of a term, and what they see, as constants; None: all attend."""
    first = "first_window_query" if term and term.queries == "window" else "first_scoring_query"
    later = term is not None and term.sees_later
    return {"FIRST_QUERY": CHUNK_FIELDS.index(first), "SEES_LATER": later}


def rotation(rope: Rope | None) -> dict[str, int]:
    """Name a rotation of queries, as constants; None: none."""
    return {"ROTATED": rope.size if rope else 0, "IS_NEOX": rope is None or rope.is_neox}


@triton.jit(do_not_specialize=["num_chunks", "table_stride", "first_head"])
def store_chunk(
    key_ptr,  # [T, H, D]
    value_ptr,  # [T, H, D]
    key_pages,
    value_pages,
    score_pages,
    position_pages,
    mass_pages,  # written when MERGES: 1
    block_table_ptr,  # [R, P], int32
    fields_ptr,
    key_factor,  # of K as it is stored, float8: 1 / scale
    value_factor,
    key_stride,
    value_stride,
    page_stride,
    word_stride,
    table_stride,
    num_chunks,
    rows_per_block,
    first_head,
    N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    MERGES: tl.constexpr,
):
    """Write TILE tokens of (chunk, KV head) after the slots in use."""
    r, h, t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = fields_ptr + r
    num_tokens = tl.load(fields + NUM_TOKENS * num_chunks)
    if t * TILE >= num_tokens:
        return
    i = t * TILE + tl.arange(0, TILE)
    live = i < num_tokens
    slot = tl.load(fields + RESIDENT_START * num_chunks) + i
    block_table = block_table_ptr + r.to(tl.int64) * table_stride
    row, offset = locate(block_table, slot, live, first_head + h, rows_per_block, N)
    token = (tl.load(fields + TOKEN_START * num_chunks) + i).to(tl.int64)
    dim = tl.arange(0, D_PAD)
    key = load_head(key_ptr, token, live, h, dim, key_stride, D)  # [TILE, D_PAD]
    value = load_head(value_ptr, token, live, h, dim, value_stride, D)  # [TILE, D_PAD]
    kv = kv_offsets(row, offset, dim, page_stride, D)
    mask = live[:, None] & (dim < D)[None, :]
    tl.store(key_pages + kv, as_stored(key, key_factor, key_pages), mask=mask)
    tl.store(value_pages + kv, as_stored(value, value_factor, value_pages), mask=mask)
    words = row * word_stride + offset
    position = tl.load(fields + LOGICAL_START * num_chunks) + i
    tl.store(position_pages + words, position, mask=live)
    tl.store(score_pages + words, tl.zeros([TILE], tl.float32), mask=live)
    if MERGES:
        tl.store(mass_pages + words, tl.full([TILE], 1.0, tl.float32), mask=live)


@triton.jit(
    do_not_specialize=[
        "num_chunks",
        "table_stride",
        "first_head",
        "lse_stride",
        "sink_stride",
        "num_positions",
    ],
)
def attend(
    query_ptr,  # [T, Hq, D]
    key_pages,
    value_pages,  # read when ATTENDS
    block_table_ptr,
    fields_ptr,
    sink_ptr,  # [Hq], or [T, Hq], float32; read when HAS_SINKS
    rope_ptr,  # [num_positions, ROTATED]: see rope.py; read when ROTATED
    out_ptr,  # [T, Hq, D]: written when ATTENDS; when ROTATED: queries, rotated
    lse_ptr,  # [Hq, T], float32: written
    scale,
    out_scale,  # of V as it is stored
    query_stride,
    out_stride,
    lse_stride,
    sink_stride,  # 0: [Hq]
    num_positions,
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
    FIRST_QUERY: tl.constexpr,
    ROTATED: tl.constexpr,
    IS_NEOX: tl.constexpr,
    ATTENDS: tl.constexpr,
    SEES_LATER: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Attend with TILE_Q queries of (chunk, query head), or find their log-sum-exp alone.

    FIRST_QUERY is the field of a chunk that tells the first query that is needed. With SEES_LATER
    queries see every slot of the chunk's table. The first ROTATED elements of queries are rotated
    by the chunk's shift, or as far as positions reach.
    """
    head, r, t = tl.program_id(0), tl.program_id(1), tl.num_programs(2) - 1 - tl.program_id(2)
    fields = fields_ptr + r
    num_tokens = tl.load(fields + NUM_TOKENS * num_chunks)
    first_query = 0 if ATTENDS else tl.load(fields + FIRST_QUERY * num_chunks)
    if t * TILE_Q >= num_tokens or (t + 1) * TILE_Q <= first_query:
        return
    resident_start = tl.load(fields + RESIDENT_START * num_chunks)
    i = t * TILE_Q + tl.arange(0, TILE_Q)
    query_mask = i < num_tokens
    token_start = tl.load(fields + TOKEN_START * num_chunks)
    token = (token_start + i).to(tl.int64)
    dim = tl.arange(0, D_PAD)
    query = load_head(query_ptr, token, query_mask, head, dim, query_stride, D)  # [TILE_Q, D_PAD]
    if ROTATED:
        end = tl.load(fields + LOGICAL_START * num_chunks) + num_tokens
        shift = tl.minimum(tl.load(fields + SHIFT * num_chunks), num_positions - end)
        query = rotated(
            query, query_ptr, token, query_mask, head, dim, query_stride,
            rope_ptr + tl.maximum(shift, 0).to(tl.int64) * ROTATED, D, ROTATED, IS_NEOX,
        )  # fmt: skip
        rotated_ptrs = out_ptr + (token * out_stride)[:, None] + head * D + dim[None, :]
        tl.store(rotated_ptrs, query, mask=query_mask[:, None] & (dim < D)[None, :])
    block_table = block_table_ptr + r.to(tl.int64) * table_stride
    sinks = sink_ptr + head
    if not ATTENDS:  # queries of a term may each have their own; after the last come its again
        sinks += (token_start + tl.minimum(i, num_tokens - 1)).to(tl.int64) * sink_stride
    row_max, row_sum = begin_softmax(sinks, TILE_Q, HAS_SINKS)
    out = tl.zeros([TILE_Q, D_PAD], tl.float32)
    visible = resident_start + num_tokens
    if not SEES_LATER:
        visible = resident_start + tl.minimum((t + 1) * TILE_Q, num_tokens)
    for start in range(0, visible, TILE_K):
        slot = start + tl.arange(0, TILE_K)
        live = slot < visible
        row, offset = locate(block_table, slot, live, first_head + head // G, rows_per_block, N)
        key = load_slots(key_pages, row, offset, live, dim, page_stride, D).to(query.dtype)
        logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale  # [TILE_Q, TILE_K]
        seen = live[None, :]
        if not SEES_LATER:
            seen = seen & (slot[None, :] <= (resident_start + i)[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        # The first tile holds slot 0, which every query sees: no maximum is -inf.
        row_max, row_sum, rescale, probs = update_softmax(row_max, row_sum, logits)
        if ATTENDS:
            value = load_slots(value_pages, row, offset, live, dim, page_stride, D).to(query.dtype)
            more = tl.dot(probs.to(value.dtype), value, input_precision=PRECISION)
            out = out * rescale[:, None] + more  # [TILE_Q, D_PAD]
    if ATTENDS:
        out_ptrs = out_ptr + (token * out_stride)[:, None] + head * D + dim[None, :]
        mean = (out * out_scale / row_sum[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptrs, mean, mask=query_mask[:, None] & (dim < D)[None, :])
    tl.store(lse_ptr + head * lse_stride + token, row_max + tl.log(row_sum), mask=query_mask)


@triton.jit(
    do_not_specialize=["num_chunks", "table_stride", "first_head", "lse_stride", "layer"],
)
def column_scores(
    query_ptr,  # [T, Hq, D]
    key_pages,
    score_pages,  # written
    position_pages,
    without_pages,  # written when KEEPS: scores before the term is added
    block_table_ptr,
    fields_ptr,
    lse_ptr,  # [Hq, T], float32
    window_bases,  # [R], int64: address of each chunk's window_scores, or 0; read when APART
    layer,  # which of those
    scale,
    query_stride,
    lse_stride,
    page_stride,
    word_stride,
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
    FIRST_QUERY: tl.constexpr,
    SEES_LATER: tl.constexpr,
    MAX: tl.constexpr,
    POWER: tl.constexpr,
    REACH: tl.constexpr,
    SKIP: tl.constexpr,
    WEIGHT: tl.constexpr,
    BY_AGE: tl.constexpr,
    APART: tl.constexpr,
    KEEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what the queries pay to the scores of TILE_K - REACH slots of (chunk, KV head).

    A tile begins REACH slots before those, with the ones that reach them. With APART the scores of
    a chunk that has window scores are stored there instead.
    """
    h, r, t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = fields_ptr + r
    num_tokens = tl.load(fields + NUM_TOKENS * num_chunks)
    resident_start = tl.load(fields + RESIDENT_START * num_chunks)
    attended_len = resident_start + num_tokens
    first_slot = t * (TILE_K - REACH)
    first_query = tl.load(fields + FIRST_QUERY * num_chunks)
    is_idle = first_slot >= attended_len
    if not APART:  # window scores are zeros where no query counts
        is_idle = is_idle | (first_query >= num_tokens)
    if is_idle:
        return
    slot = first_slot - REACH + tl.arange(0, TILE_K)
    live = slot < attended_len
    if REACH > 0:
        live = live & (slot >= 0)
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
    begin = first_query
    first = tl.maximum(slot * 0 if SEES_LATER else slot - resident_start, first_query)
    if not SEES_LATER:
        # Query i sees the tile's first slot when resident_start + i is no less.
        begin = tl.maximum(first_query, first_slot - REACH - resident_start)
    if SKIP > 0:
        first = tl.maximum(first, position + SKIP - logical_start)
    # A query head is not unrolled: each would have buffers of its own for the loads in flight.
    for g in range(G):
        head = h * G + g
        columns = add_columns(
            columns, key, first, begin // TILE_Q * TILE_Q, num_tokens, query_ptr,
            lse_ptr + head * lse_stride, token_start, head, dim, query_stride, scale, D, TILE_Q,
            POWER, MAX, PRECISION,
        )  # fmt: skip
    if REACH > 0:
        distance = position[:, None] - position[None, :]  # [TILE_K, TILE_K]
        near = live[None, :] & (distance >= 0) & (distance <= REACH)
        columns = tl.max(tl.where(near, columns[None, :], 0.0), axis=1)
    columns = columns * WEIGHT
    if BY_AGE:
        columns = columns * (logical_start + num_tokens - position).to(tl.float32)
    own = live & (slot >= first_slot) if REACH > 0 else live
    if SEES_LATER:
        own = own & (slot >= tl.load(fields + FIRST_SCORED_SLOT * num_chunks))
    score = tl.load(score_pages + words, mask=own, other=0.0)
    if KEEPS:
        tl.store(without_pages + words, score, mask=own)
    if APART:
        base = tl.load(window_bases + r)
        of_head = (layer * tl.num_programs(0) + h).to(tl.int64) * attended_len
        window_scores = base.to(tl.pointer_type(tl.float32)) + of_head
        num_apart = tl.where(base != 0, attended_len, 0)
        tl.store(window_scores + slot, columns, mask=own & (slot < num_apart))
        own = own & (slot >= num_apart)
    tl.store(score_pages + words, score + columns, mask=own)
