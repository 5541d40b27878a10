"""Chunks of prompts: store, attend causally, and sum what each key receives.

::

    lse_g[i] = log sum_{j <= start + i} exp(scale * q_g[i] . k[j])       attend, or FlashAttention
    score[j] += sum_{i, g} exp(scale * q_g[i] . k[j] - lse_g[i]) ** power         column_scores

Twins of ``reference.attend_and_score`` (arXiv 2306.14048, Algorithm 1). Keys are read from the
pages, those of the chunk too; each tile of keys has one owner, which walks the queries that see it.
With a weight in ``REPLAY`` the chunk's queries are asked again, from behind its end, as in
``reference.replay``: both sums run over every key, and no output is made.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK_FIELDS = ("token", "num_tokens", "start", "position", "scores_from")
"""Rows of the chunks' orders, [len(CHUNK_FIELDS), R] int32."""
TOKEN = tl.constexpr(0)
NUM_TOKENS = tl.constexpr(1)
START = tl.constexpr(2)
POSITION = tl.constexpr(3)
SCORES_FROM = tl.constexpr(4)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_chunks", "table_stride"])
def store_chunk(
    key_ptr,  # [T, H, D]
    value_ptr,  # [T, H, D]
    initial_score_ptr,  # [T, H], float32; read when HAS_INITIAL_SCORE
    key_pages,
    value_pages,
    score_pages,
    position_pages,
    table_ptr,  # [R, P], int32
    fields_ptr,
    key_stride,
    value_stride,
    page_stride,
    word_stride,
    table_stride,
    num_chunks,
    num_kv_heads,
    N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    HAS_INITIAL_SCORE: tl.constexpr,
):
    """Write TILE tokens of (chunk, KV head) behind the slots in use."""
    r, h, t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_tokens = tl.load(fields_ptr + NUM_TOKENS * num_chunks + r)
    if t * TILE >= num_tokens:
        return
    i = t * TILE + tl.arange(0, TILE)
    live = i < num_tokens
    slot = tl.load(fields_ptr + START * num_chunks + r) + i
    table = table_ptr + r.to(tl.int64) * table_stride
    block = tl.load(table + slot // N, mask=live, other=0).to(tl.int64)
    row, at = block * num_kv_heads + h, slot % N
    token = (tl.load(fields_ptr + TOKEN * num_chunks + r) + i).to(tl.int64)
    dim = tl.arange(0, D_PAD)
    mask = live[:, None] & (dim < D)[None, :]
    heads = h * D + dim[None, :]
    key = tl.load(key_ptr + (token * key_stride)[:, None] + heads, mask=mask)
    value = tl.load(value_ptr + (token * value_stride)[:, None] + heads, mask=mask)
    here = (row * page_stride + at * D)[:, None] + dim[None, :]
    tl.store(key_pages + here, key, mask=mask)
    tl.store(value_pages + here, value, mask=mask)
    words = row * word_stride + at
    position = tl.load(fields_ptr + POSITION * num_chunks + r) + i
    tl.store(position_pages + words, position, mask=live)
    score = tl.zeros([TILE], tl.float32)
    if HAS_INITIAL_SCORE:
        score = tl.load(initial_score_ptr + token * num_kv_heads + h, mask=live)
    tl.store(score_pages + words, score, mask=live)


@triton.jit(do_not_specialize=["num_chunks", "table_stride", "lse_stride"])
def attend(
    query_ptr,  # [T, Hq, D]
    key_pages,
    value_pages,
    table_ptr,
    fields_ptr,
    out_ptr,  # [T, Hq, D]: written where nothing is asked again
    lse_ptr,  # [Hq, T], float32: written
    scale,
    query_stride,
    out_stride,
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
    REPLAY: tl.constexpr,
):
    """TILE_Q queries of (chunk, query head): where FlashAttention is not, or is of no use."""
    t, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_tokens = tl.load(fields_ptr + NUM_TOKENS * num_chunks + r)
    silent = 0
    if REPLAY:
        silent = tl.load(fields_ptr + SCORES_FROM * num_chunks + r)
    if t * TILE_Q >= num_tokens or (t + 1) * TILE_Q <= silent:
        return
    start = tl.load(fields_ptr + START * num_chunks + r)
    i = t * TILE_Q + tl.arange(0, TILE_Q)
    token = (tl.load(fields_ptr + TOKEN * num_chunks + r) + i).to(tl.int64)
    dim = tl.arange(0, D_PAD)
    asked = (i < num_tokens)[:, None] & (dim < D)[None, :]
    heads = head * D + dim[None, :]
    query = tl.load(query_ptr + (token * query_stride)[:, None] + heads, mask=asked, other=0.0)
    table = table_ptr + r.to(tl.int64) * table_stride
    peak = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    out = tl.zeros([TILE_Q, D_PAD], tl.float32)
    visible = start + (num_tokens if REPLAY else tl.minimum((t + 1) * TILE_Q, num_tokens))
    for first in range(0, visible, TILE_K):
        slot = first + tl.arange(0, TILE_K)
        live = slot < visible
        block = tl.load(table + slot // N, mask=live, other=0).to(tl.int64)
        row = block * num_kv_heads + head // G
        here = (row * page_stride + slot % N * D)[:, None] + dim[None, :]
        mask = live[:, None] & (dim < D)[None, :]
        key = tl.load(key_pages + here, mask=mask, other=0.0)
        logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        seen = live[None, :]
        if not REPLAY:
            seen = seen & (slot[None, :] <= (start + i)[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        # The first tile holds slot 0, which every query sees: no maximum is -inf.
        higher = tl.maximum(peak, tl.max(logits, axis=1))
        fade = tl.exp(peak - higher)
        probs = tl.exp(logits - higher[:, None])
        total = total * fade + tl.sum(probs, axis=1)
        if not REPLAY:
            value = tl.load(value_pages + here, mask=mask, other=0.0)
            more = tl.dot(probs.to(value.dtype), value, input_precision=PRECISION)
            out = out * fade[:, None] + more
        peak = higher
    if not REPLAY:
        answer = out_ptr + (token * out_stride)[:, None] + heads
        tl.store(answer, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=asked)
    tl.store(lse_ptr + head * lse_stride + token, peak + tl.log(total), mask=i < num_tokens)


@triton.jit(do_not_specialize=["num_chunks", "table_stride", "skip_recent", "lse_stride"])
def column_scores(
    query_ptr,
    key_pages,
    score_pages,  # written
    position_pages,
    table_ptr,
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
    skip_recent,
    N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    G: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    POWER: tl.constexpr,
    SKIPS: tl.constexpr,
    PRECISION: tl.constexpr,
    REPLAY: tl.constexpr,
):
    """Add to the scores of TILE_K slots of (chunk, KV head) what all scoring queries give them."""
    t, h, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_tokens = tl.load(fields_ptr + NUM_TOKENS * num_chunks + r)
    start = tl.load(fields_ptr + START * num_chunks + r)
    first = t * TILE_K
    if first >= start + num_tokens:
        return
    slot = first + tl.arange(0, TILE_K)
    live = slot < start + num_tokens
    table = table_ptr + r.to(tl.int64) * table_stride
    row = tl.load(table + slot // N, mask=live, other=0).to(tl.int64) * num_kv_heads + h
    dim = tl.arange(0, D_PAD)
    here = (row * page_stride + slot % N * D)[:, None] + dim[None, :]
    key = tl.load(key_pages + here, mask=live[:, None] & (dim < D)[None, :], other=0.0)
    words = row * word_stride + slot % N
    position = tl.load(position_pages + words, mask=live, other=0)
    token_0 = tl.load(fields_ptr + TOKEN * num_chunks + r).to(tl.int64)
    position_0 = tl.load(fields_ptr + POSITION * num_chunks + r)
    scores_from = tl.load(fields_ptr + SCORES_FROM * num_chunks + r)
    exponent = scale * LOG2_E
    received = tl.zeros([TILE_K], tl.float32)
    begin = scores_from
    if REPLAY == 0:
        # Query i sees slot `first` when start + i >= first.
        begin = tl.maximum(begin, first - start)
    begin = begin // TILE_Q * TILE_Q
    # A query head is not unrolled: each would have buffers of its own for the loads in flight.
    for g in range(G):
        head = h * G + g
        for first_query in range(begin, num_tokens, TILE_Q):
            i = first_query + tl.arange(0, TILE_Q)
            asks = (i < num_tokens) & (i >= scores_from)
            asked = query_ptr + ((token_0 + i) * query_stride)[:, None] + head * D + dim[None, :]
            query = tl.load(asked, mask=asks[:, None] & (dim < D)[None, :], other=0.0)
            lse = tl.load(lse_ptr + head * lse_stride + token_0 + i, mask=asks, other=0.0)
            counts = asks[None, :] & live[:, None]
            if REPLAY == 0:
                counts = counts & (slot[:, None] <= (start + i)[None, :])
            if SKIPS:
                counts = counts & ((position_0 + i)[None, :] - position[:, None] >= skip_recent)
            logits = tl.dot(key, tl.trans(query), input_precision=PRECISION) * exponent
            # A slot that a query does not see may have any logit: exp is not asked for it.
            probs = tl.exp2(tl.where(counts, logits - (lse * LOG2_E)[None, :], float("-inf")))
            received += tl.sum(probs if POWER == 1 else probs * probs, axis=1)
    if REPLAY != 0:
        end = position_0 + num_tokens
        received = received * REPLAY * (end - position).to(tl.float32) / end
    score = tl.load(score_pages + words, mask=live, other=0.0)
    tl.store(score_pages + words, score + received, mask=live)
