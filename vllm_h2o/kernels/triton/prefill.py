"""Chunks of prompts: store, attend causally, and score.

::

    lse_g[i] = log sum_{j <= resident_start + i} exp(scale * q_g[i] . k[j])         attend
               with e^sink_g in the sum, where there are attention sinks
    score[j] += sum_{i, g} exp(scale * q_g[i] . k[j] - lse_g[i]) ** power           column_scores
    score[j] = max(score[j], max_{i, g} of the same)                       with BY_MAXIMUM

Twins of ``reference.attend_and_score`` (arXiv 2306.14048, Algorithm 1). Keys are read from the
pages, those of the chunk too. FlashAttention may take the place of ``attend``. In ``column_scores``
each tile of keys belongs to one program, which walks the queries that see it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_h2o.kernels.triton.tiles import (
    add_columns,
    as_stored,
    begin_softmax,
    combined,
    kv_offsets,
    load_head,
    load_slots,
    locate,
    update_softmax,
)

CHUNK_FIELDS = (
    "tokens.start",
    "num_tokens",
    "resident_start",
    "logical_start",
    "first_scoring_query",
    "first_window_query",
    "first_scored_slot",
)
"""Attributes of PromptChunk: rows of ``fields_ptr``, [len(CHUNK_FIELDS), R] int32."""
TOKEN_START = tl.constexpr(CHUNK_FIELDS.index("tokens.start"))
NUM_TOKENS = tl.constexpr(CHUNK_FIELDS.index("num_tokens"))
RESIDENT_START = tl.constexpr(CHUNK_FIELDS.index("resident_start"))
LOGICAL_START = tl.constexpr(CHUNK_FIELDS.index("logical_start"))
FIRST_SCORING_QUERY = tl.constexpr(CHUNK_FIELDS.index("first_scoring_query"))
FIRST_WINDOW_QUERY = tl.constexpr(CHUNK_FIELDS.index("first_window_query"))
FIRST_SCORED_SLOT = tl.constexpr(CHUNK_FIELDS.index("first_scored_slot"))


@triton.jit(do_not_specialize=["num_chunks", "table_stride", "first_head"])
def store_chunk(
    key_ptr,  # [T, H, D]
    value_ptr,  # [T, H, D]
    initial_score_ptr,  # [T, H], float32; read when HAS_INITIAL_SCORE
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
    HAS_INITIAL_SCORE: tl.constexpr,
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
    score = tl.zeros([TILE], tl.float32)
    if HAS_INITIAL_SCORE:
        score = tl.load(initial_score_ptr + token * tl.num_programs(1) + h, mask=live)
    tl.store(score_pages + words, score, mask=live)
    if MERGES:
        tl.store(mass_pages + words, tl.full([TILE], 1.0, tl.float32), mask=live)


@triton.jit(do_not_specialize=["num_chunks", "table_stride", "first_head", "lse_stride"])
def attend(
    query_ptr,  # [T, Hq, D]
    key_pages,
    value_pages,
    block_table_ptr,
    fields_ptr,
    sink_ptr,  # [Hq], float32; read when HAS_SINKS
    out_ptr,  # [T, Hq, D]: written
    lse_ptr,  # [Hq, T], float32: written
    scale,
    out_scale,  # of V as it is stored
    query_stride,
    out_stride,
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
    PRECISION: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """TILE_Q queries of (chunk, query head): where FlashAttention is missing, or of no use."""
    head, r, t = tl.program_id(0), tl.program_id(1), tl.num_programs(2) - 1 - tl.program_id(2)
    fields = fields_ptr + r
    num_tokens = tl.load(fields + NUM_TOKENS * num_chunks)
    if t * TILE_Q >= num_tokens:
        return
    resident_start = tl.load(fields + RESIDENT_START * num_chunks)
    i = t * TILE_Q + tl.arange(0, TILE_Q)
    query_mask = i < num_tokens
    token = (tl.load(fields + TOKEN_START * num_chunks) + i).to(tl.int64)
    dim = tl.arange(0, D_PAD)
    query = load_head(query_ptr, token, query_mask, head, dim, query_stride, D)  # [TILE_Q, D_PAD]
    block_table = block_table_ptr + r.to(tl.int64) * table_stride
    row_max, row_sum = begin_softmax(sink_ptr, head, TILE_Q, HAS_SINKS)
    out = tl.zeros([TILE_Q, D_PAD], tl.float32)
    visible = resident_start + tl.minimum((t + 1) * TILE_Q, num_tokens)
    for start in range(0, visible, TILE_K):
        slot = start + tl.arange(0, TILE_K)
        live = slot < visible
        row, offset = locate(block_table, slot, live, first_head + head // G, rows_per_block, N)
        key = load_slots(key_pages, row, offset, live, dim, page_stride, D).to(query.dtype)
        logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale  # [TILE_Q, TILE_K]
        seen = live[None, :] & (slot[None, :] <= (resident_start + i)[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        # The first tile holds slot 0, which every query sees: no maximum is -inf.
        row_max, row_sum, rescale, probs = update_softmax(row_max, row_sum, logits)
        value = load_slots(value_pages, row, offset, live, dim, page_stride, D).to(query.dtype)
        more = tl.dot(probs.to(value.dtype), value, input_precision=PRECISION)  # [TILE_Q, D_PAD]
        out = out * rescale[:, None] + more
    out_ptrs = out_ptr + (token * out_stride)[:, None] + head * D + dim[None, :]
    mean = (out * out_scale / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, mean, mask=query_mask[:, None] & (dim < D)[None, :])
    tl.store(lse_ptr + head * lse_stride + token, row_max + tl.log(row_sum), mask=query_mask)


@triton.jit(
    do_not_specialize=[
        "num_chunks", "table_stride", "first_head", "skip_recent", "lse_stride", "layer",
    ]
)  # fmt: skip
def column_scores(
    query_ptr,  # [T, Hq, D]
    key_pages,
    score_pages,  # written
    position_pages,
    block_table_ptr,
    fields_ptr,
    lse_ptr,  # [Hq, T], float32
    window_bases,  # [R], int64: address of each chunk's window_scores, or 0; read when WINDOW
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
    skip_recent,
    N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    G: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    POWER: tl.constexpr,
    SKIPS: tl.constexpr,
    BY_MAXIMUM: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Add the scoring queries' contributions to the scores of TILE_K slots of (chunk, KV head).

    With WINDOW those of an observation window's queries are stored outside the pages.
    """
    h, r, t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = fields_ptr + r
    num_tokens = tl.load(fields + NUM_TOKENS * num_chunks)
    resident_start = tl.load(fields + RESIDENT_START * num_chunks)
    first_slot = t * TILE_K
    if first_slot >= resident_start + num_tokens:
        return
    first_scoring_query = tl.load(
        fields + (FIRST_WINDOW_QUERY if WINDOW else FIRST_SCORING_QUERY) * num_chunks
    )
    if WINDOW:
        window_base = tl.load(window_bases + r)
        if window_base == 0:
            return
    elif first_scoring_query >= num_tokens:
        return
    slot = first_slot + tl.arange(0, TILE_K)
    live = slot < resident_start + num_tokens
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
    first = tl.maximum(slot - resident_start, first_scoring_query)
    if SKIPS:
        first = tl.maximum(first, position + skip_recent - logical_start)
    # Query i sees the first slot when resident_start + i >= first_slot.
    begin = tl.maximum(first_scoring_query, first_slot - resident_start) // TILE_Q * TILE_Q
    # A query head is not unrolled: each would have buffers of its own for the loads in flight.
    for g in range(G):
        head = h * G + g
        columns = add_columns(
            columns, key, first, begin, num_tokens, query_ptr, lse_ptr + head * lse_stride,
            token_start, head, dim, query_stride, scale, D, TILE_Q, POWER, BY_MAXIMUM, PRECISION,
        )  # fmt: skip
    if WINDOW:
        head_base = (layer * tl.num_programs(0) + h).to(tl.int64) * (resident_start + num_tokens)
        window_scores = window_base.to(tl.pointer_type(tl.float32)) + head_base
        tl.store(window_scores + slot, columns, mask=live)
    else:
        score = tl.load(score_pages + words, mask=live, other=0.0)
        tl.store(score_pages + words, combined(score, columns, BY_MAXIMUM), mask=live)
