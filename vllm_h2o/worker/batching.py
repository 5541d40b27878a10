# SPDX-License-Identifier: Apache-2.0
"""Requests with one new token become decode batches: copied together, or kept where graphs read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from typing import Protocol

import numpy as np
import torch

from vllm_h2o.kernels.batch import DECODE_FIELDS, DecodeBatch
from vllm_h2o.pages import num_pages
from vllm_h2o.wire import RequestPlan

MAX_BATCH_ELEMENTS = 1 << 24
"""Elements of K that one decode call may copy: 64 MiB in float32."""
MAX_INDICES = 1 << 20
"""Columns of a block table that are found at once: 8 MiB, int64."""


@dataclass(frozen=True)
class Rows:
    """The rows of a step's batch, read once.

    Args:
        request_ids: of the rows that have tokens, in the order of the batch.
        plans: of the same rows.
        block_table: [num_rows, width], int32; rows after those of ``plans`` are padding.
        starts: each row's first token in the step's tensors.
        num_rows: padding included.
        num_window_queries: queries at a prompt's end that add to scores; None: all of it do.

    """

    request_ids: Sequence[str]
    plans: Sequence[RequestPlan]
    block_table: torch.Tensor
    starts: Sequence[int]
    num_rows: int
    num_window_queries: int | None = None

    @cached_property
    def decoding(self) -> list[int]:
        """Indices of the rows with one new token."""
        return [row for row, plan in enumerate(self.plans) if plan.num_new == 1]

    @property
    def num_padded(self) -> int:
        """Decoding rows and padding, where a captured graph wants a fixed number."""
        return self.num_rows if len(self.decoding) == len(self.plans) else len(self.decoding)

    @property
    def decode_plans(self) -> list[RequestPlan]:
        """The plans of the rows with one new token."""
        return [self.plans[row] for row in self.decoding]

    def fields(self, row: int) -> tuple[int, ...]:
        """One request's :data:`DECODE_FIELDS`."""
        plan = self.plans[row]
        return (
            self.starts[row],
            plan.attended_len,
            plan.overwrites,
            plan.selects,
            plan.position_start,
            plan.recent_start,
            plan.budget.num_sinks,
            self._scores(plan),
            plan.attends_split,
        )

    def _scores(self, plan: RequestPlan) -> bool:
        """Whether the query of a request's one new token adds to scores."""
        window = plan.prompt_end if self.num_window_queries is None else self.num_window_queries
        return not plan.fits and plan.logical_start >= plan.prompt_end - window


class Batching(Protocol):
    """One way to make decode batches."""

    def __call__(self, rows: Rows) -> list[DecodeBatch]:
        """The batches of a step's decoding rows."""


@dataclass(frozen=True)
class CopiedBatches:
    """For kernels that copy K and V of a batch: requests of about one length together.

    Args:
        block_size: slots of a page.
        page_elements: elements of K in a page.
        prefix_caching: whether a request's own blocks may begin anywhere in its row.

    """

    block_size: int
    page_elements: int
    prefix_caching: bool

    def __call__(self, rows: Rows) -> list[DecodeBatch]:
        """One batch for each group of rows of about one length."""
        return [self._batch(rows, group) for group in self._groups(rows)]

    def _num_pages(self, plan: RequestPlan) -> int:
        return num_pages(plan.attended_len, self.block_size)

    def _groups(self, rows: Rows) -> list[list[int]]:
        """Group rows so that a batch is not padded to one long request.

        The longest of a group has less than twice the pages of the shortest, and the group's K has
        at most ``MAX_BATCH_ELEMENTS`` elements, unless one row alone has more, or KV heads share
        slots: they are padded to the longest.
        """
        groups: list[list[int]] = []
        room: dict[int, int] = {}
        open_group: dict[int, list[int]] = {}
        for row in rows.decoding:
            size = self._num_pages(rows.plans[row]).bit_length()
            widest = (1 << size) * self.page_elements
            if room.get(size, 0) < widest:
                open_group[size] = []
                groups.append(open_group[size])
                room[size] = max(MAX_BATCH_ELEMENTS, widest)
            open_group[size].append(row)
            room[size] -= widest
        return groups

    def _batch(self, rows: Rows, group: list[int]) -> DecodeBatch:
        plans = [rows.plans[row] for row in group]
        width = _num_columns(plans, self.block_size)
        fields = torch.tensor([rows.fields(row) for row in group])
        if self.prefix_caching:
            table = torch.empty(len(group), width, dtype=torch.int32, device=fields.device)
            _write_own_blocks(table, rows.block_table[group], plans)
        else:  # a row has columns for the longest text, and this copies it
            table = rows.block_table[:, :width][group]
        return DecodeBatch(table, fields.to(table.device).T)


class KeptFields:
    """The fields of a batch's rows, of which those of ongoing requests are moved on, not made anew.

    Args:
        max_rows: of a batch, padding included.

    """

    def __init__(self, max_rows: int) -> None:
        self._plans: list[RequestPlan] = []
        self._lengths = np.zeros((max_rows, 2), dtype=np.int64)
        # The most recent positions that are kept, and where they began when the plan was made.
        self._recent = np.zeros((max_rows, 2), dtype=np.int64)
        self._fields = np.zeros((max_rows, len(DECODE_FIELDS)), dtype=np.int64)

    def __call__(self, rows: Rows) -> np.ndarray:
        """[num_padded, len(DECODE_FIELDS)], int64; until the next call."""
        plans, num_rows = rows.decode_plans, len(rows.decoding)
        both = chain.from_iterable((plan.logical_start, plan.resident_start) for plan in plans)
        lengths = np.fromiter(both, np.int64, 2 * num_rows).reshape(num_rows, 2)
        fields = self._fields[: rows.num_padded]
        for index, (plan, last) in enumerate(zip_longest(plans, self._plans[:num_rows])):
            # A plan that changes is another object; one that goes on is the same, moved on.
            if plan is not last:
                fields[index] = rows.fields(rows.decoding[index])
                self._lengths[index] = lengths[index]
                self._recent[index] = plan.budget.num_recent, plan.recent_start
        moved = lengths - self._lengths[:num_rows]
        fields[:num_rows, _ATTENDED] += moved[:, 1]
        fields[:num_rows, _START] += moved[:, 0]
        most, first = self._recent[:num_rows].T
        fields[:num_rows, _RECENT] = np.maximum(fields[:num_rows, _START] + 1 - most, first)
        fields[:num_rows, _TOKEN] = np.asarray(rows.starts)[rows.decoding]
        fields[num_rows:] = 0
        fields[num_rows:, _TOKEN] = range(num_rows, rows.num_padded)
        self._plans, self._lengths[:num_rows] = plans, lengths
        return fields


_TOKEN, _ATTENDED, _START, _RECENT = map(
    DECODE_FIELDS.index, ("token", "attended_len", "logical_start", "recent_start")
)


class PersistentBatch:
    """One batch in buffers that stay: a captured graph reads them at each run.

    Args:
        max_rows: of a batch, padding included.
        block_size: slots of a page.
        device: of the buffers.
        prefix_caching: whether a request's own blocks may begin anywhere in its row; elsewhere the
            block table is vLLM's, which stays, too.

    """

    def __init__(
        self, max_rows: int, block_size: int, device: torch.device, prefix_caching: bool
    ) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._written = KeptFields(max_rows)
        self._fields = torch.zeros(max_rows, len(DECODE_FIELDS), dtype=torch.int64, device=device)
        self._block_table = torch.zeros(0, 0, dtype=torch.int32, device=device)

    def __call__(self, rows: Rows) -> list[DecodeBatch]:
        """One batch of ``num_padded`` rows, or none."""
        if rows.num_padded == 0:
            return []
        device = self._fields.device
        fields = self._fields[: rows.num_padded]
        # Fresh host memory each step: an earlier step's copy may still wait for the device.
        written = torch.tensor(self._written(rows), pin_memory=_pins(device))
        fields.copy_(written, non_blocking=True)
        table = rows.block_table
        if len(rows.decoding) < len(rows.plans):
            # A row has columns for the longest text. On a GPU their number splits the work.
            if not self.prefix_caching and not table.is_cuda:
                table = table[:, : _num_columns(rows.decode_plans, self.block_size)]
            chosen = torch.tensor(rows.decoding, pin_memory=_pins(device))
            table = table[chosen.to(device, non_blocking=True)]
        table = table[: rows.num_padded]
        if self.prefix_caching:
            table = self._kept(table, rows.decode_plans)
        return [DecodeBatch(table, fields.T)]

    def _kept(self, table: torch.Tensor, plans: Sequence[RequestPlan]) -> torch.Tensor:
        """Own blocks in the buffer that graphs read: of its columns those in use are written."""
        if self._block_table.shape[1] != table.shape[1]:
            shape = (len(self._fields), table.shape[1])
            self._block_table = torch.zeros(shape, dtype=table.dtype, device=table.device)
        kept = self._block_table[: len(table)]
        width = max(_num_columns(plans, self.block_size), 1)  # of padding the first is read
        _write_own_blocks(kept[:, :width], table, plans)
        return kept


def _num_columns(plans: Sequence[RequestPlan], block_size: int) -> int:
    """Columns of the block table up to the last that these requests use, from their first on."""
    return num_pages(max((plan.attended_len for plan in plans), default=0), block_size)


def _write_own_blocks(out: torch.Tensor, table: torch.Tensor, plans: Sequence[RequestPlan]) -> None:
    """Write rows of a block table, each from its request's first block on.

    Args:
        out: [rows, width], written; of padding the row's first columns.
        table: [rows, columns].
        plans: of the first rows.

    """
    start = torch.zeros(len(table), 1, dtype=torch.int64, pin_memory=_pins(table.device))
    start[: len(plans), 0] = torch.tensor([plan.first_block_idx for plan in plans])
    start = start.to(table.device, non_blocking=True)
    column = torch.arange(out.shape[1], device=table.device)
    size = max(1, MAX_INDICES // out.shape[1])
    for begin in range(0, len(table), size):
        rows = slice(begin, begin + size)
        index = (start[rows] + column).clamp_(max=table.shape[1] - 1)
        out[rows] = table[rows].gather(1, index)


def _pins(device: torch.device) -> bool:
    return device.type == "cuda"
