# SPDX-License-Identifier: Apache-2.0
"""Parts of several kernels: slots of the pages, heads of the step's tokens, softmax, scores.

They are compiled into the kernels that call them. ``dim`` is ``arange(0, D_PAD)`` everywhere.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def locate(block_table, slot, live, first_row, rows_per_block, N: tl.constexpr):
    """(cache row, int64; offset in its page) of each slot of a KV head of one request."""
    page = slot // N
    row = page_row(block_table, page, live, first_row, rows_per_block, rows_per_block, False)
    return row, slot % N


@triton.jit
def page_row(block_table, page, live, first_row, row_step, rows_per_block, CAN_SPLIT: tl.constexpr):
    """Cache row, int64, of each page of a KV head of one request: see cache.py.

    Without CAN_SPLIT every head has its own row of each block.
    """
    if CAN_SPLIT:
        at = first_row + page * row_step
        block = tl.load(block_table + at // rows_per_block, mask=live, other=0).to(tl.int64)
        return block * rows_per_block + at % rows_per_block
    else:
        block = tl.load(block_table + page, mask=live, other=0).to(tl.int64)
        return block * rows_per_block + first_row


@triton.jit
def kv_offsets(row, offset, dim, page_stride, D: tl.constexpr):
    """[TILE, D_PAD]: elements at which K, or V, of each slot lies."""
    return (row * page_stride + offset * D)[:, None] + dim[None, :]


@triton.jit
def load_slots(pages, row, offset, live, dim, page_stride, D: tl.constexpr):
    """[TILE, D_PAD]: K, or V, of each slot; zeros where a slot is not ``live``."""
    mask = live[:, None] & (dim < D)[None, :]
    return tl.load(pages + kv_offsets(row, offset, dim, page_stride, D), mask=mask, other=0.0)


@triton.jit
def as_stored(x, factor, pages):
    """Keys or values in the type of their pages; of float8 the nearest to ``x * factor``.

    It is rounded here, to nothing else on any device, and the conversion has nothing to round.
    """
    stored: tl.constexpr = pages.dtype.element_ty
    if stored.primitive_bitwidth == 8:
        is_e4m3: tl.constexpr = stored == tl.float8e4nv
        largest: tl.constexpr = 448.0 if is_e4m3 else 57344.0
        normal: tl.constexpr = 2.0**-6 if is_e4m3 else 2.0**-14  # the smallest
        # Added to a subnormal number, it leaves those bits that such a number has.
        aligner: tl.constexpr = 1.5 * 2**14 if is_e4m3 else 1.5 * 2**7
        dropped: tl.constexpr = 20 if is_e4m3 else 21  # bits of a float's 23
        x = tl.maximum(x.to(tl.float32) * factor, -largest, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, largest, propagate_nan=tl.PropagateNan.ALL)
        bits = x.to(tl.int32, bitcast=True)
        bits = bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)
        rounded = ((bits >> dropped) << dropped).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < normal, (x + aligner) - aligner, rounded)
    return x.to(stored)


@triton.jit
def load_head(tokens_ptr, token, live, head, dim, token_stride, D: tl.constexpr):
    """[TILE, D_PAD]: one head of some rows of the step's tensors; zeros where not ``live``."""
    mask = live[:, None] & (dim < D)[None, :]
    ptrs = tokens_ptr + (token * token_stride)[:, None] + head * D + dim[None, :]
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def rotated(
    query,  # [TILE, D_PAD]
    query_ptr,  # from which it was loaded
    token,
    live,
    head,
    dim,
    query_stride,
    turn_ptr,  # of the distance: ROTATED / 2 cosines, and as many sines
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    IS_NEOX: tl.constexpr,
):
    """Queries, the first ROTATED elements rotated: the twin of rope.py."""
    half: tl.constexpr = ROTATED // 2
    if IS_NEOX:
        is_first, pair = dim < half, dim % half
        other = tl.where(is_first, dim + half, dim - half)
    else:
        is_first, pair, other = dim % 2 == 0, dim // 2, dim ^ 1
    turns = dim < ROTATED
    cos = tl.load(turn_ptr + pair, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(turn_ptr + half + pair, mask=turns, other=0.0).to(tl.float32)
    sin = tl.where(is_first, -sin, sin)
    # Of an element that is not rotated nothing is read.
    other = tl.where(turns, other, D)
    partner = load_head(query_ptr, token, live, head, other, query_stride, D)
    turned = query.to(tl.float32) * cos[None, :] + partner.to(tl.float32) * sin[None, :]
    return turned.to(query.dtype)


@triton.jit
def begin_softmax(sink_ptrs, TILE_Q: tl.constexpr, HAS_SINKS: tl.constexpr):
    """(row_max, row_sum) before the first tile: of nothing, or of attention sinks.

    ``sink_ptrs`` is the address of the head's, or [TILE_Q], of each query's.
    """
    row_max = tl.full([TILE_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_Q], tl.float32)
    if HAS_SINKS:
        row_max = tl.zeros([TILE_Q], tl.float32) + tl.load(sink_ptrs)
        row_sum = tl.full([TILE_Q], 1.0, tl.float32)
    return row_max, row_sum


@triton.jit
def update_softmax(row_max, row_sum, logits):
    """(row_max, row_sum, rescale, probs) after one more tile of logits, [TILE_Q, TILE_K].

    ``rescale`` is the factor of what was summed up before. No maximum may be -inf.
    """
    new_max = tl.maximum(row_max, tl.max(logits, axis=1))
    rescale = tl.exp(row_max - new_max)
    probs = tl.exp(logits - new_max[:, None])
    return new_max, row_sum * rescale + tl.sum(probs, axis=1), rescale, probs


@triton.jit
def add_columns(
    columns,  # [TILE_K]: with the queries of other heads
    key,  # [TILE_K, D_PAD]
    first,  # [TILE_K]: the first query that counts for each key
    begin,  # a multiple of TILE_Q, none of these before it
    num_tokens,
    query_ptr,  # [T, Hq, D]
    lse_ptr,  # [T], float32: the head's
    token_start,
    head,
    dim,
    query_stride,
    scale,
    D: tl.constexpr,
    TILE_Q: tl.constexpr,
    POWER: tl.constexpr,
    MAX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the probabilities that queries of a head pay to each key, or their squares: [TILE_K].

    With MAX take the largest instead.
    """
    exponent = scale * LOG2_E
    for start in range(begin, num_tokens, TILE_Q):
        i = start + tl.arange(0, TILE_Q)
        live = i < num_tokens
        query = load_head(query_ptr, token_start + i, live, head, dim, query_stride, D)
        lse = tl.load(lse_ptr + token_start + i, mask=live, other=float("inf"))  # pays nothing
        logits = tl.dot(key, tl.trans(query), input_precision=PRECISION) * exponent
        logits -= (lse * LOG2_E)[None, :]  # [TILE_K, TILE_Q]
        # The logit of a slot that a query does not see may be anything: exp2 never gets it.
        probs = tl.exp2(tl.where(i[None, :] >= first[:, None], logits, float("-inf")))
        each = probs if POWER == 1 else probs * probs
        if MAX:
            columns = tl.maximum(columns, tl.max(each, axis=1))
        else:
            columns += tl.sum(each, axis=1)
    return columns
