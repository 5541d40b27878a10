# SPDX-License-Identifier: Apache-2.0
"""The MLP of a ReLU model by neurons, for GPUs: lists of rows first, then those rows alone.

::

    up:    estimate (a program has 64 rows of the copy, and lists those that a token keeps)
           multiply (reads the number of a list on the device)
    down:  list_used (a program has 512 neurons), add_rows (a sum of each list), add_up

A list has a place of its own for each program that writes it, and a number beside it: no atomics,
sums in one order, and no host that waits, so that the launches can be captured in a graph.
Definition: kernels/neurons.py and kernels/coarse.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_h2o.kernels.coarse import BLOCK, GROUP, Coarse
from vllm_h2o.kernels.neurons import check_inputs
from vllm_h2o.kernels.triton.sizes import precision

LISTED = 512
"""Neurons that a program of ``list_used`` lists, at most."""
ESTIMATED = 4 * BLOCK
"""Rows that a program of ``estimate`` estimates."""
ADDED = 32
"""Rows that a program of ``add_rows`` loads at once."""
PARTIAL = 16
"""Partial sums that a program of ``add_up`` loads at once."""
COLUMNS = 128
"""Columns of a program that adds up."""
MULTIPLIED = 16
"""Rows of a program of ``multiply``."""
ROW_BYTES = 256
"""Bytes of each row that it loads at once."""
HALF = tl.constexpr(GROUP // 2)
OCTET = tl.constexpr(8)
ROUND = tl.constexpr(1.5 * 2.0**23)
"""Adding and subtracting it rounds to the nearest whole number, as torch does."""


@triton.jit
def list_places(used, program, used_ptr, SIZE: tl.constexpr):
    """List the neurons of a program that are used, and return their places; others have none."""
    place = program * SIZE + tl.cumsum(used, axis=0) - used
    tl.store(used_ptr + place, program * SIZE + tl.arange(0, SIZE), mask=used > 0)
    return place


@triton.jit
def count_rows(counts_ptr, total_ptr, num_lists, num_rows, SIZE: tl.constexpr):
    """Add the rows read, and the rows there, to the totals; only one program calls this."""
    read = tl.zeros([SIZE], tl.int32)
    for first in range(0, num_lists, SIZE):
        at = first + tl.arange(0, SIZE)
        read += tl.load(counts_ptr + at, mask=at < num_lists, other=0)
    tl.store(total_ptr, tl.load(total_ptr) + tl.sum(read, axis=0))
    tl.store(total_ptr + 1, tl.load(total_ptr + 1) + num_rows)


@triton.jit
def list_used(
    x_ptr,  # [tokens, neurons]
    used_ptr,  # [lists, SIZE]: written
    counts_ptr,  # [lists]: written
    x_stride,
    num_tokens,
    num_rows,
    T_PAD: tl.constexpr,
    SIZE: tl.constexpr,
):
    """List the neurons that any token uses. Grid: lists."""
    program = tl.program_id(0)
    neuron = program * SIZE + tl.arange(0, SIZE)
    token = tl.arange(0, T_PAD)
    there = (token < num_tokens)[:, None] & (neuron < num_rows)[None, :]
    x = tl.load(x_ptr + token[:, None] * x_stride + neuron[None, :], mask=there, other=0.0)
    used = tl.max((x != 0).to(tl.int32), axis=0)
    list_places(used, program, used_ptr, SIZE)
    tl.store(counts_ptr + program, tl.sum(used, axis=0))


@triton.jit
def add_rows(
    x_ptr,  # [tokens, neurons]
    rows_ptr,  # [neurons, width]
    used_ptr,  # [lists, SIZE]
    counts_ptr,  # [lists]
    partial_out_ptr,  # [lists, tokens, width]: written
    x_stride,
    num_tokens,
    width,
    T_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add up the rows of a list, as each token uses them. Grid: tiles of columns, lists."""
    listed = tl.program_id(1)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token = tl.arange(0, T_PAD)
    inside = (column < width)[None, :]
    there = (token < num_tokens)[:, None]
    count = tl.load(counts_ptr + listed)
    sums = tl.zeros([T_PAD, TILE], tl.float32)
    for first in range(0, count, ROWS):
        place = first + tl.arange(0, ROWS)
        own = place < count
        neuron = tl.load(used_ptr + listed * SIZE + place, mask=own, other=0)
        at = rows_ptr + neuron.to(tl.int64)[:, None] * width + column[None, :]
        row = tl.load(at, mask=own[:, None] & inside, other=0.0)
        at = x_ptr + token[:, None] * x_stride + neuron[None, :]
        x = tl.load(at, mask=there & own[None, :], other=0.0)
        sums = tl.dot(x, row, sums, input_precision=PRECISION)
    out = (listed * num_tokens + token)[:, None] * width + column[None, :]
    tl.store(partial_out_ptr + out, sums, mask=there & inside)


@triton.jit
def add_up(
    partial_out_ptr,  # [lists, tokens, width]
    bias_ptr,  # [width]
    counts_ptr,  # [lists]
    total_ptr,  # [2]: rows read and rows there, added to
    out_ptr,  # [tokens, width]: written
    num_lists,
    num_rows,
    width,
    HAS_BIAS: tl.constexpr,
    ADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add the sums of all lists, in their order, to the bias. Grid: tiles of columns, tokens."""
    token, num_tokens = tl.program_id(1), tl.num_programs(1)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = column < width
    total = tl.zeros([TILE], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    for first in range(0, num_lists, ADDED):
        listed = first + tl.arange(0, ADDED)
        at = (listed * num_tokens + token)[:, None] * width + column[None, :]
        there = (listed < num_lists)[:, None] & inside[None, :]
        total += tl.sum(tl.load(partial_out_ptr + at, mask=there, other=0.0), axis=0)
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * width + column, out, mask=inside)
    if (token == 0) & (tl.program_id(0) == 0):
        count_rows(counts_ptr, total_ptr, num_lists, num_rows, ADDED)


@triton.jit
def half_of(x_ptr, x_stride, first, width, token, there, HALF: tl.constexpr):
    """Load half of the columns of a group, in the order of codes: [HALF, tokens]."""
    j = tl.arange(0, HALF)
    column = first + j // 4 * 8 + j % 4
    inside = (column < width)[:, None] & there[None, :]
    at = x_ptr + token[None, :] * x_stride + column[:, None]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def rounded(x, step):
    """Round tokens to whole multiples of their step, which 16 bits hold; 0 where it is 0."""
    whole = x / tl.where(step == 0, 1.0, step)[None, :]
    return ((whole + ROUND) - ROUND).to(tl.float16)


@triton.jit
def estimate(
    x_ptr,  # [tokens, width]
    bias_ptr,  # [neurons]
    codes_ptr,  # [blocks, octets, 16, 4] of uint8
    scales_ptr,  # [blocks, groups, 16] of bfloat16
    cuts_ptr,  # [blocks * 16]
    used_ptr,  # [lists, SIZE]: written
    keeps_ptr,  # [lists, SIZE]: written; bit t: whether token t keeps the row
    counts_ptr,  # [lists]: written
    out_ptr,  # [tokens, neurons]: zeros are written
    x_stride,
    num_tokens,
    num_rows,
    width,
    num_groups,
    HAS_BIAS: tl.constexpr,
    T_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the rows of the copy that any token keeps. Grid: lists."""
    program = tl.program_id(0)
    row = program * SIZE + tl.arange(0, SIZE)
    block = program * (SIZE // BLOCK) + tl.arange(0, SIZE // BLOCK)
    block_inside = block * BLOCK < num_rows
    token = tl.arange(0, T_PAD)
    there = token < num_tokens
    sums = tl.zeros([SIZE, T_PAD], tl.float32)
    squares = tl.zeros([T_PAD], tl.float32)
    byte = tl.arange(0, BLOCK * HALF)
    for group in range(0, num_groups):
        at = (block[:, None] * num_groups + group).to(tl.int64) * (BLOCK * HALF) + byte[None, :]
        codes = tl.load(codes_ptr + at, mask=block_inside[:, None], other=0)
        codes = tl.reshape(codes, [SIZE // BLOCK, OCTET, BLOCK, 4])
        codes = tl.reshape(tl.permute(codes, (0, 2, 1, 3)), [SIZE, HALF])
        at = (row // BLOCK * num_groups + group) * BLOCK + row % BLOCK
        scale = tl.load(scales_ptr + at, mask=row < num_rows, other=0.0).to(tl.float32)
        low = half_of(x_ptr, x_stride, group * 2 * HALF, width, token, there, HALF)
        high = half_of(x_ptr, x_stride, group * 2 * HALF + 4, width, token, there, HALF)
        squares += tl.sum(low * low + high * high, axis=0)
        step = tl.maximum(tl.max(tl.abs(low), axis=0), tl.max(tl.abs(high), axis=0)) / 127
        # Products of whole numbers, and their sums: exact.
        whole = tl.dot((codes & 15).to(tl.float16) - 8, rounded(low, step))
        whole += tl.dot((codes >> 4).to(tl.float16) - 8, rounded(high, step))
        sums += whole * scale[:, None] * step[None, :]
    if HAS_BIAS:
        sums += tl.load(bias_ptr + row, mask=row < num_rows, other=0.0).to(tl.float32)[:, None]
    cut = tl.load(cuts_ptr + row, mask=row < num_rows, other=0.0)
    # A sum that is not a number is not at most anything: the row is kept.
    left_out = sums <= -cut[:, None] * tl.sqrt(squares)[None, :]
    kept = ((left_out == 0) & (row < num_rows)[:, None] & there[None, :]).to(tl.int32)
    used = tl.max(kept, axis=1)
    place = list_places(used, program, used_ptr, SIZE)
    tl.store(keeps_ptr + place, tl.sum(kept << token[None, :], axis=1), mask=used > 0)
    tl.store(counts_ptr + program, tl.sum(used, axis=0))
    at = token[None, :] * num_rows + row[:, None]
    inside = (row < num_rows)[:, None] & there[None, :]
    tl.store(out_ptr + at, tl.zeros([SIZE, T_PAD], out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def multiply(
    x_ptr,  # [tokens, width]
    rows_ptr,  # [neurons, width]
    bias_ptr,  # [neurons]
    used_ptr,  # [lists, SIZE]
    keeps_ptr,  # [lists, SIZE]
    counts_ptr,  # [lists]
    total_ptr,  # [2]: rows read and rows there, added to
    out_ptr,  # [tokens, neurons]: written where a row is kept
    x_stride,
    num_tokens,
    num_rows,
    width,
    HAS_BIAS: tl.constexpr,
    T_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply each token by the rows that it keeps. Grid: lists, parts of a list."""
    listed, first = tl.program_id(0), tl.program_id(1) * ROWS
    token = tl.arange(0, T_PAD)
    there = (token < num_tokens)[None, :]
    place = first + tl.arange(0, ROWS)
    count = tl.load(counts_ptr + listed)
    own = place < count
    if first < count:
        neuron = tl.load(used_ptr + listed * SIZE + place, mask=own, other=0)
        row_at = rows_ptr + neuron.to(tl.int64)[:, None] * width
        sums = tl.zeros([ROWS, T_PAD], tl.float32)
        for begin in range(0, width, TILE):
            column = begin + tl.arange(0, TILE)
            inside = column < width
            row = tl.load(row_at + column[None, :], mask=own[:, None] & inside[None, :], other=0.0)
            at = x_ptr + token[None, :] * x_stride + column[:, None]
            x = tl.load(at, mask=inside[:, None] & there, other=0.0)
            sums = tl.dot(row, x, sums, input_precision=PRECISION)
        if HAS_BIAS:
            sums += tl.load(bias_ptr + neuron, mask=own, other=0.0).to(tl.float32)[:, None]
        keeps = tl.load(keeps_ptr + listed * SIZE + place, mask=own, other=0)
        kept = ((keeps[:, None] >> token[None, :]) & 1) != 0
        at = out_ptr + token[None, :] * num_rows + neuron[:, None]
        tl.store(at, sums.to(out_ptr.dtype.element_ty), mask=kept & there & own[:, None])
    if (listed == 0) & (first == 0):
        count_rows(counts_ptr, total_ptr, tl.num_programs(0), num_rows, SIZE)


def constants(tokens: int, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Return the constants of each kernel, but for HAS_BIAS.

    Args:
        tokens: of a step.
        dtype: of tokens and rows.

    """
    padded = max(16, triton.next_power_of_2(tokens))
    products = {"T_PAD": padded, "PRECISION": precision(dtype)}
    return {
        "list_used": {"T_PAD": triton.next_power_of_2(tokens), "SIZE": LISTED},
        "add_rows": {**products, "SIZE": LISTED, "ROWS": ADDED, "TILE": COLUMNS},
        "add_up": {"ADDED": PARTIAL, "TILE": COLUMNS},
        "estimate": {"T_PAD": padded, "SIZE": ESTIMATED, "BLOCK": BLOCK},
        "multiply": {
            **products, "SIZE": ESTIMATED, "ROWS": MULTIPLIED, "TILE": ROW_BYTES // dtype.itemsize,
        },
    }  # fmt: skip


class TritonNeurons:
    """See :class:`vllm_h2o.kernels.neurons.NeuronKernels`."""

    name = "triton"

    def up(
        self,
        x: torch.Tensor,
        rows: torch.Tensor,
        bias: torch.Tensor | None,
        coarse: Coarse,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """List the rows that any token keeps, and multiply by them."""
        check_inputs(x, rows, bias)
        (tokens, width), count = x.shape, len(rows)
        lists = triton.cdiv(count, ESTIMATED)
        y = x.new_empty(tokens, count)
        used, keeps = counts.new_empty(2, lists, ESTIMATED, dtype=torch.int32)
        found = counts.new_empty(lists, dtype=torch.int32)
        own, biased = constants(tokens, x.dtype), {"HAS_BIAS": bias is not None}
        estimate[lists,](
            x, bias, *vars(coarse).values(), used, keeps, found, y, x.stride(0), tokens, count,
            width, coarse.scales.shape[1], **own["estimate"], **biased,
        )  # fmt: skip
        multiply[lists, ESTIMATED // MULTIPLIED](
            x, rows, bias, used, keeps, found, counts, y, x.stride(0), tokens, count, width,
            **own["multiply"], **biased,
        )  # fmt: skip
        return y

    def down(
        self, x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, counts: torch.Tensor
    ) -> torch.Tensor:
        """List the rows that any token uses, and add them up, a list at a time."""
        check_inputs(x, rows, bias)
        tokens, (count, width) = len(x), rows.shape
        lists = triton.cdiv(count, LISTED)
        y = x.new_empty(tokens, width)
        used = counts.new_empty(lists, LISTED, dtype=torch.int32)
        found = counts.new_empty(lists, dtype=torch.int32)
        partial = x.new_empty(lists, tokens, width, dtype=torch.float32)
        own = constants(tokens, x.dtype)
        list_used[lists,](x, used, found, x.stride(0), tokens, count, **own["list_used"])
        add_rows[triton.cdiv(width, COLUMNS), lists](
            x, rows, used, found, partial, x.stride(0), tokens, width, **own["add_rows"]
        )
        add_up[triton.cdiv(width, COLUMNS), tokens](
            partial, bias, found, counts, y, lists, count, width, **own["add_up"],
            HAS_BIAS=bias is not None,
        )  # fmt: skip
        return y
