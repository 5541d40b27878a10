"""One new token for each of B requests, in two launches after the store: attend, then score.

::

    logits[g, j] = scale * q_g . k_j                    attend_split, over shares of the slots
    P[g, j] = exp(logits[g, j] - lse_g); out = P V      reduce_and_score: shares joined
    score[j] += sum_g P[g, j] ** power; victim = argmin reduce_and_score, in the same pass

Raw logits pass through a scratch with one float32 for each query head and slot of the pool, so no
place in it belongs to two requests, and a share's end needs no bookkeeping. Twins of
``reference.attend_and_score`` and ``select_victims`` (arXiv 2306.14048, Algorithm 1).

Every request is one row of programs; those of padding (``attended`` = 0) write zeros and leave.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Rows of DecodeBatch.orders that the kernels read: see vllm_h2o.kernels.batch.DECODE_FIELDS.
TOKEN = tl.constexpr(0)
ATTENDED = tl.constexpr(1)
OVERWRITES = tl.constexpr(2)
SELECTS = tl.constexpr(3)
POSITION = tl.constexpr(4)
RECENT_FROM = tl.constexpr(5)
NUM_SINKS = tl.constexpr(6)
NEXT_OFFSET = tl.constexpr(8)
NUM_FREE_SLOTS = tl.constexpr(9)
SCORES = tl.constexpr(10)


@triton.jit
def new_slot(orders, field_stride, victims_ptr, owner, h, num_kv_heads):
    """The slot that a head's new token takes. ``orders`` points at the request's."""
    attended = tl.load(orders + ATTENDED * field_stride).to(tl.int32)
    overwrites = tl.load(orders + OVERWRITES * field_stride) != 0
    victim = tl.load(victims_ptr + owner.to(tl.int64) * num_kv_heads + h)
    refilled = victim + tl.load(orders + NEXT_OFFSET * field_stride).to(tl.int32)
    return tl.where(overwrites, refilled, attended - 1)


@triton.jit
def store_token(
    key_ptr,  # [T, H, D]
    value_ptr,  # [T, H, D]
    initial_score_ptr,  # [T, H], float32; read when HAS_INITIAL_SCORE
    key_pages,  # [R, N, D]
    value_pages,  # [R, N, D]
    score_pages,  # [R, N], float32
    position_pages,  # [R, N], int32
    table_ptr,  # [B, P], int32
    fields_ptr,  # [orders, B], int64
    victims_ptr,  # [num_blocks, H], int32
    key_stride,
    value_stride,
    page_stride,  # of K and V, in elements
    word_stride,  # of scores and positions, in words
    table_stride,
    field_stride,
    request_stride,
    num_kv_heads,
    N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HAS_INITIAL_SCORE: tl.constexpr,
):
    """Write K, V, position and first score of (request, head) into the new token's slot."""
    b, h = tl.program_id(0), tl.program_id(1)
    orders = fields_ptr + b * request_stride
    if tl.load(orders + ATTENDED * field_stride) == 0:
        return
    table = table_ptr + b.to(tl.int64) * table_stride
    slot = new_slot(orders, field_stride, victims_ptr, tl.load(table), h, num_kv_heads)
    row = tl.load(table + slot // N).to(tl.int64) * num_kv_heads + h
    at = slot % N
    token = tl.load(orders + TOKEN * field_stride)
    dim = tl.arange(0, D_PAD)
    key = tl.load(key_ptr + token * key_stride + h * D + dim, mask=dim < D)
    value = tl.load(value_ptr + token * value_stride + h * D + dim, mask=dim < D)
    tl.store(key_pages + row * page_stride + at * D + dim, key, mask=dim < D)
    tl.store(value_pages + row * page_stride + at * D + dim, value, mask=dim < D)
    position = tl.load(orders + POSITION * field_stride).to(tl.int32)
    tl.store(position_pages + row * word_stride + at, position)
    score = 0.0
    if HAS_INITIAL_SCORE:
        score = tl.load(initial_score_ptr + token * num_kv_heads + h)
    tl.store(score_pages + row * word_stride + at, score)


@triton.jit
def split_size(attended, num_kv_splits, TILE: tl.constexpr):
    """Slots of each share: whole tiles, the same number for all but the last."""
    return tl.cdiv(tl.cdiv(attended, TILE), num_kv_splits) * TILE


@triton.jit(do_not_specialize=["num_kv_splits"])
def attend_split(
    query_ptr,  # [T, Hq, D]
    key_pages,
    value_pages,
    table_ptr,
    fields_ptr,
    victims_ptr,
    logits_ptr,  # [num_blocks, H, G, N], float32: written
    part_ptr,  # [B, H, shares, G, D], float32: written, each share's own mean of V
    peak_ptr,  # [B, H, shares, G, 2], float32: written, largest logit and sum of exp below it
    scale,
    query_stride,
    page_stride,
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
):
    """Attend to one share of (request, KV head); G_PAD = 1 multiplies without matrix units."""
    b, h, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    orders = fields_ptr + b * request_stride
    attended = tl.load(orders + ATTENDED * field_stride).to(tl.int32)
    share = split_size(attended, num_kv_splits, TILE)
    begin = s * share
    if begin >= attended:
        return
    table = table_ptr + b.to(tl.int64) * table_stride
    token = tl.load(orders + TOKEN * field_stride)
    group, dim = tl.arange(0, G_PAD), tl.arange(0, D_PAD)
    asked = query_ptr + token * query_stride + (h * G + group[:, None]) * D + dim[None, :]
    query = tl.load(asked, mask=(group < G)[:, None] & (dim < D)[None, :], other=0.0)
    slot_new = new_slot(orders, field_stride, victims_ptr, tl.load(table), h, num_kv_heads)
    hole = tl.load(orders + NUM_FREE_SLOTS * field_stride).to(tl.int32)
    peak = tl.full([G_PAD], float("-inf"), tl.float32)
    total = tl.zeros([G_PAD], tl.float32)
    # One query alone is summed up slot by slot of a tile, and over these in the end.
    out = tl.zeros([TILE if G_PAD == 1 else G_PAD, D_PAD], tl.float32)
    for first in range(begin, tl.minimum(begin + share, attended), TILE):
        slot = first + tl.arange(0, TILE)
        live = slot < attended
        block = tl.load(table + slot // N, mask=live, other=0).to(tl.int64)
        row, at = block * num_kv_heads + h, slot % N
        here = row[:, None] * page_stride + (at * D)[:, None] + dim[None, :]
        if HAS_FREE_SLOTS:
            live = live & ((slot <= slot_new) | (slot > slot_new + hole))
        mask = live[:, None] & (dim < D)[None, :]
        # Both at once: V is on its way while K is multiplied.
        key = tl.load(key_pages + here, mask=mask, other=0.0)
        value = tl.load(value_pages + here, mask=mask, other=0.0)
        if G_PAD == 1:
            logits = tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1)[None, :]
        else:
            logits = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        logits = tl.where(live[None, :], logits * scale, float("-inf"))
        if KEEPS_LOGITS:
            raw = logits_ptr + (row * G * N + at)[None, :] + group[:, None] * N
            tl.store(raw, logits, mask=(group < G)[:, None] & (slot < attended)[None, :])
        higher = tl.maximum(peak, tl.max(logits, axis=1))
        # A share may begin with nothing but the num_free_slots: exp(-inf - -inf) would be NaN.
        ground = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp(peak - ground)
        probs = tl.exp(logits - ground[:, None])
        total = total * fade + tl.sum(probs, axis=1)
        if G_PAD == 1:
            seen = tl.trans(probs) * value.to(tl.float32)
        else:
            seen = tl.dot(probs.to(value.dtype), value, input_precision=PRECISION)
        out = out * fade[:, None] + seen
        peak = higher
    if G_PAD == 1:
        out = tl.sum(out, axis=0)[None, :]
    part = ((b * num_kv_heads + h).to(tl.int64) * num_kv_splits + s) * G + group
    mean = out / tl.where(total == 0.0, 1.0, total)[:, None]
    kept = (group < G)[:, None] & (dim < D)[None, :]
    tl.store(part_ptr + part[:, None] * D + dim[None, :], mean, mask=kept)
    tl.store(peak_ptr + part * 2, peak, mask=group < G)
    tl.store(peak_ptr + part * 2 + 1, total, mask=group < G)


@triton.jit
def merge_splits(
    part_ptr,
    peak_ptr,
    part,  # [G_PAD]: index of the first share of each query head
    num_live,
    MAX_KV_SPLITS: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    group,
    dim,
):
    """The shares' means of V, weighted; and each query head's log-sum-exp of all logits."""
    share = tl.arange(0, MAX_KV_SPLITS)
    live = (share < num_live)[:, None] & (group < G)[None, :]
    peaks = peak_ptr + (part[None, :] + share[:, None] * G) * 2
    highest = tl.max(tl.load(peaks, mask=live, other=float("-inf")), axis=0)
    # Rows of the group's padding have no share: exp(-inf - -inf) would be NaN.
    peak = tl.where(group < G, highest, 0.0)
    total = tl.zeros(group.shape, tl.float32)
    out = tl.zeros([group.shape[0], dim.shape[0]], tl.float32)
    kept = (group < G)[:, None] & (dim < D)[None, :]
    for s in range(num_live):
        at = part + s * G
        high = tl.load(peak_ptr + at * 2, mask=group < G, other=0.0)
        weight = tl.exp(high - peak) * tl.load(peak_ptr + at * 2 + 1, mask=group < G, other=1.0)
        mean = tl.load(part_ptr + at[:, None] * D + dim[None, :], mask=kept, other=0.0)
        out += weight[:, None] * mean
        total += weight
    return out / total[:, None], peak + tl.log(total)


@triton.jit(do_not_specialize=["num_kv_splits", "skip_recent"])
def reduce_and_score(
    out_ptr,  # [T, Hq, D]: written
    score_pages,  # written
    position_pages,
    table_ptr,
    fields_ptr,
    victims_ptr,  # written where a request selects
    logits_ptr,
    part_ptr,
    peak_ptr,
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
):
    """Join the shares of (request, KV head), add to scores, and find the next victim."""
    b, h = tl.program_id(0), tl.program_id(1)
    orders = fields_ptr + b * request_stride
    attended = tl.load(orders + ATTENDED * field_stride).to(tl.int32)
    token = tl.load(orders + TOKEN * field_stride)
    group, dim = tl.arange(0, G_PAD), tl.arange(0, D_PAD)
    answer = out_ptr + token * out_stride + (h * G + group[:, None]) * D + dim[None, :]
    kept = (group < G)[:, None] & (dim < D)[None, :]
    if attended == 0:
        tl.store(answer, tl.zeros([G_PAD, D_PAD], out_ptr.dtype.element_ty), mask=kept)
        return
    share = split_size(attended, num_kv_splits, TILE)
    part = (b * num_kv_heads + h).to(tl.int64) * num_kv_splits * G + group
    num_live = tl.cdiv(attended, share)
    out, lse = merge_splits(part_ptr, peak_ptr, part, num_live, MAX_KV_SPLITS, D, G, group, dim)
    tl.store(answer, out.to(out_ptr.dtype.element_ty), mask=kept)
    selects = tl.load(orders + SELECTS * field_stride) != 0
    scores = tl.load(orders + SCORES * field_stride) != 0
    # A query that scores nothing is one that no token is old enough for.
    youngest = tl.where(scores, skip_recent, 1 << 30)
    if (POWER > 0) | selects:
        table = table_ptr + b.to(tl.int64) * table_stride
        now = tl.load(orders + POSITION * field_stride).to(tl.int32)
        recent_from = tl.load(orders + RECENT_FROM * field_stride).to(tl.int32)
        num_sinks = tl.load(orders + NUM_SINKS * field_stride)
        offset = tl.arange(0, N_PAD)
        # Running minima, each in its own lane: lowest score, of equals the newest, and its slot.
        lanes: tl.constexpr = PAGES if BY_PAGE else PAGES * N_PAD
        low = tl.full([lanes], float("inf"), tl.float32)
        newest = tl.full([lanes], -1, tl.int32)
        where = tl.zeros([lanes], tl.int32)
        for first in range(0, tl.cdiv(attended, N), PAGES):
            page = first + tl.arange(0, PAGES)
            slot = page[:, None] * N + offset[None, :]
            live = (slot < attended) & (offset < N)[None, :]
            block = tl.load(table + page, mask=page * N < attended, other=0).to(tl.int64)
            row = block * num_kv_heads + h
            words = row[:, None] * word_stride + offset[None, :]
            position = tl.load(position_pages + words, mask=live, other=-1)
            score = tl.load(score_pages + words, mask=live, other=0.0)
            if POWER > 0:
                given = tl.zeros([PAGES, N_PAD], tl.float32)
                for g in tl.static_range(G):
                    raw = logits_ptr + ((row * G + g) * N)[:, None] + offset[None, :]
                    logit = tl.load(raw, mask=live, other=float("-inf"))
                    prob = tl.exp(logit - tl.sum(tl.where(group == g, lse, 0.0)))
                    given += prob if POWER == 1 else prob * prob
                counts = live & (now - position >= youngest)
                score += tl.where(counts, given, 0.0)
                tl.store(score_pages + words, score, mask=counts)
            if BY_AGE:
                score = score / tl.maximum(now + 1 - position, 1)
            candidate = live & (position < recent_from) & (position >= num_sinks)
            if BY_PAGE:
                whole = tl.sum((candidate | (offset >= N)[None, :]).to(tl.int32), axis=1) == N_PAD
                ranked = tl.where(whole, tl.sum(score, axis=1), float("inf"))
                # Of a page, the first slot's position.
                at = tl.sum(tl.where((offset == 0)[None, :], position, 0), axis=1)
                start = page * N
            else:
                whole = tl.reshape(candidate, [lanes])
                ranked = tl.where(whole, tl.reshape(score, [lanes]), float("inf"))
                at = tl.reshape(position, [lanes])
                start = tl.reshape(slot, [lanes])
            better = whole & ((ranked < low) | ((ranked == low) & (at > newest)))
            low = tl.where(better, ranked, low)
            newest = tl.where(better, at, newest)
            where = tl.where(better, start, where)
        if selects:
            lowest = tl.min(low, axis=0)
            found = tl.max(tl.where(low == lowest, newest, -1), axis=0)
            victim = tl.max(tl.where((low == lowest) & (newest == found), where, 0), axis=0)
            owner = tl.load(table).to(tl.int64)
            tl.store(victims_ptr + owner * num_kv_heads + h, victim)
