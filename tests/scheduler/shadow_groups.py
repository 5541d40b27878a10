# SPDX-License-Identifier: Apache-2.0
"""Groups of other layers, as vLLM's own kernels see them: sliding windows, and states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.v1.core.sched.output import SchedulerOutput

Slots = dict[tuple[int, int], tuple[object, int]]
Token = Callable[[str, int], tuple[object, int]]


@dataclass
class ShadowWindow:
    """Writes each token where its position says, and reads back what its window reaches.

    Args:
        size: tokens of the window, a token's own among them.
        block_size: slots of a page.
        tables: each request's row of blocks, as a model runner keeps it.

    """

    size: int
    block_size: int
    tables: dict[str, list[int]] = field(default_factory=dict)

    def execute(
        self,
        output: SchedulerOutput,
        group: int,
        slots: Slots,
        token: Token,
    ) -> None:
        """One step: every request's tokens are written, then read.

        Args:
            output: of the step.
            group: index of this group.
            slots: what the slots of all groups hold.
            token: what the one of a request's token at a position holds, in the policy's group.

        """
        for request_id in output.finished_req_ids:
            self.tables.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids[group], output)
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                assert block_ids is not None
                self._begin(request_id, block_ids[group], output)
            elif block_ids is not None:
                self._extend(request_id, block_ids[group], output)
        plans = output.residency_plan.requests  # type: ignore[attr-defined]
        for request_id, plan in plans.items():
            for position in range(plan.logical_start, plan.logical_end):
                slots[self._slot(request_id, position)] = (group, token(request_id, position))
        for request_id, plan in plans.items():
            first = max(plan.logical_start - self.size + 1, 0)
            for position in range(first, plan.logical_end):
                found = slots[self._slot(request_id, position)]
                assert found == (group, token(request_id, position)), (request_id, plan)

    def _begin(self, request_id: str, block_ids: list[int], output: SchedulerOutput) -> None:
        self.tables[request_id] = []
        num_found = output.residency_plan.requests[request_id].logical_start // self.block_size
        self._extend(request_id, block_ids, output, num_found)

    def _extend(
        self, request_id: str, block_ids: list[int], output: SchedulerOutput, num_found: int = 0
    ) -> None:
        """Pages that are taken are cleared first: others' scores are no keys or values."""
        assert set(block_ids[num_found:]) <= set(output.new_block_ids_to_zero or ())
        self.tables[request_id].extend(block_ids)

    def _slot(self, request_id: str, position: int) -> tuple[int, int]:
        row = self.tables[request_id]
        return row[position // self.block_size], position % self.block_size


@dataclass
class ShadowState:
    """Reads the state after the last token that was computed, and writes that of a step's last.

    Args:
        block_size: slots of a page, all of which the state takes.
        blocks: each request's block.

    """

    block_size: int
    blocks: dict[str, int] = field(default_factory=dict)

    def execute(self, output: SchedulerOutput, group: int, slots: Slots, token: Token) -> None:
        """One step; see :meth:`ShadowWindow.execute`."""
        for request_id in output.finished_req_ids:
            self.blocks.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            (self.blocks[new.req_id],) = new.block_ids[group]
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                assert block_ids is not None
                (self.blocks[request_id],) = block_ids[group]
            else:
                assert not (block_ids and block_ids[group])
        plans = output.residency_plan.requests  # type: ignore[attr-defined]
        for request_id, plan in plans.items():
            for offset in range(self.block_size):
                slot = self.blocks[request_id], offset
                if plan.logical_start:
                    before = token(request_id, plan.logical_start - 1)
                    assert slots[slot] == (group, before), (request_id, plan)
                slots[slot] = (group, token(request_id, plan.logical_end - 1))
