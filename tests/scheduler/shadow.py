# SPDX-License-Identifier: Apache-2.0
"""``ShadowPool`` plays the worker: it executes every step's plan on a dictionary of slots.

In order of scheduling; at each step it checks that every slot a request attends to holds that
request's own token. A page that was leaked, freed twice or shared shows up as a foreign token.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence

from vllm.v1.core.sched.output import SchedulerOutput

from tests.scheduler.shadow_groups import ShadowState, ShadowWindow
from vllm_h2o.wire import RequestPlan


class ShadowPool:
    """Executes plans on slots named (block id, offset); each holds (whose, position).

    Whose it is: a token that was computed with all before it, of the prompt or of a request that
    fits whole, is anybody's with the same prefix; a later one is that of its request's life.

    ``held`` is what the slots of each request hold after its last step, as (life, positions), and
    ``num_gone`` how many positions have left them while the request went on.

    ``positions`` are those of what a request holds, by index in its text, and ``num_renumbered``
    how often they were counted anew.

    ``going_on`` are sessions that follow what is resident with a part of their input.

    ``windows`` are those of groups before the policy's, whose slots are named alike; 0: states.
    """

    def __init__(self, seed: int, block_size: int, windows: Sequence[int] = ()) -> None:
        self.block_size = block_size
        self.others = [
            ShadowWindow(size, block_size) if size else ShadowState(block_size) for size in windows
        ]
        self.random = random.Random(seed)
        self.slots: dict[tuple[int, int], tuple[object, int]] = {}
        self.before = dict(self.slots)
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.whole_until: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.lives: Counter[str] = Counter()
        self.going_on: set[str] = set()
        self.victims: dict[str, int] = {}
        self.num_evictions = 0
        self.held: dict[str, tuple[int, set[int]]] = {}
        self.num_gone = 0
        self.positions: dict[tuple[str, int], dict[int, int]] = {}
        self.num_renumbered = 0

    def execute(self, output: SchedulerOutput) -> None:
        """Run one step: update the block table rows as a model runner does, then every plan."""
        own = len(self.others)
        for block in output.new_block_ids_to_zero or ():
            for offset in range(self.block_size):
                self.slots.pop((block, offset), None)
        for request_id in output.finished_req_ids:
            self.tables.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[own])
            # A session's next part, after all that was computed of it.
            last = self.positions.get((new.req_id, self.lives[new.req_id]))
            start = output.residency_plan.requests[new.req_id].logical_start
            if last and start == max(last) + 1:
                self.going_on.add(new.req_id)
            else:
                self.lives[new.req_id] += 1
                self.going_on.discard(new.req_id)
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                assert block_ids is not None
                self.tables[request_id] = list(block_ids[own])
                self.lives[request_id] += 1
            elif block_ids is not None:
                self.tables[request_id].extend(block_ids[own])
        # No request reads what another writes in the same step: kernels take them in any order.
        self.before = dict(self.slots)
        for request_id, plan in output.residency_plan.requests.items():
            self._run(request_id, plan)
        for index, other in enumerate(self.others):
            other.execute(output, index, self.slots, self._token)

    def accept(self, request_id: str, plan: RequestPlan, num: int) -> None:
        """Make the first ``num`` drafts of a step tokens of the request."""
        for i in range(1, num + 1):
            slot = self._slot(request_id, plan.resident_start + i, plan.first_block_idx)
            self.slots[slot] = self._token(request_id, plan.logical_start + i)

    def _slot(self, request_id: str, index: int, start: int) -> tuple[int, int]:
        row = self.tables[request_id]
        return row[start + index // self.block_size], index % self.block_size

    def _token(self, request_id: str, position: int) -> tuple[object, int]:
        """The content of a slot with the request's token at ``position``."""
        if position >= self.whole_until[request_id]:
            return (request_id, self.lives[request_id]), position
        prefix = self.prompts[request_id][: position + 1]
        return (prefix, position + 1 - len(prefix)), position

    def _run(self, request_id: str, plan: RequestPlan) -> None:
        if plan.fits:
            self.whole_until[request_id] = sys.maxsize
        elif plan.in_prompt and request_id not in self.going_on:
            self.whole_until[request_id] = plan.logical_end
        start = plan.first_block_idx
        own = set()
        self._number(request_id, plan)
        for back in range(1, plan.num_unscored + 1):  # drafts that were accepted
            slot = self._slot(request_id, plan.resident_start - back, start)
            position = plan.logical_start - back
            assert self.slots[slot] == self._token(request_id, position)
        if plan.overwrites:
            assert plan.num_new == 1
            slot = self._slot(request_id, self.victims[request_id], start)
            self.slots[slot] = self._token(request_id, plan.logical_start)
            own.add(slot)
        else:
            for i in range(plan.num_new):
                slot = self._slot(request_id, plan.resident_start + i, start)
                self.slots[slot] = self._token(request_id, plan.logical_start + i)
                own.add(slot)
        self._check_slots(request_id, plan, own)

    def _check_slots(self, request_id: str, plan: RequestPlan, own: set[tuple[int, int]]) -> None:
        """Check what is attended to, and let survivors and victims be chosen at random."""
        start = plan.first_block_idx
        held = [self._slot(request_id, index, start) for index in range(plan.attended_len)]
        tokens = [(self.slots if slot in own else self.before)[slot] for slot in held]
        positions = [token[1] for token in tokens]
        assert tokens == [self._token(request_id, p) for p in positions], (request_id, plan, tokens)
        assert len(set(positions)) == len(positions)
        recent = range(max(plan.logical_end - _num_recent(plan), 0), plan.logical_end)
        assert set(recent) <= set(positions)
        old = [p for p in positions if plan.budget.num_sinks <= p < recent.start]
        if plan.num_survivors:
            dropped = self._dropped(positions, set(old), plan)
            positions = [p for p in positions if p not in dropped]
            for index, position in enumerate(positions):
                slot = self._slot(request_id, index, plan.pack_block_idx or start)
                self.slots[slot] = self._token(request_id, position)
            self.num_evictions += len(dropped)
        elif plan.selects:
            self.victims[request_id] = positions.index(self.random.choice(old))
            self.num_evictions += 1
        if plan.has_drafts:
            for i in range(1, plan.num_new):
                slot = self._slot(request_id, plan.resident_start + i, start)
                self.slots[slot] = ("draft", plan.logical_start + i)
        self._compare(request_id, plan, set(positions))
        if not plan.has_drafts and not plan.num_unscored:
            self._check_positions(request_id, plan, set(positions))

    def _dropped(self, positions: list[int], old: set[int], plan: RequestPlan) -> set[int]:
        """Choose what is packed away: tokens, or whole pages of slots in order of position."""
        unit = plan.budget.unit
        num, rest = divmod(len(positions) - plan.num_survivors, unit)
        assert not rest
        if unit == 1:
            return set(self.random.sample(sorted(old), num))
        assert positions == sorted(positions)
        pages = [positions[i : i + unit] for i in range(0, len(positions), unit)]
        able = [page for page in pages if len(page) == unit and old.issuperset(page)]
        return set(sum(self.random.sample(able, num), []))

    def _number(self, request_id: str, plan: RequestPlan) -> None:
        """Give the step's tokens positions, after what is held has been renumbered, if it is."""
        life = (request_id, self.lives[request_id])
        held = self.positions.setdefault(life, {i: i for i in range(plan.logical_start)})
        if plan.renumbers_from:
            assert plan.renumbers_from == max(held.values()) + 1
            held = {index: rank for rank, index in enumerate(sorted(held))}
            assert len(held) == plan.resident_start == plan.position_start
            self.num_renumbered += 1
        for i in range(plan.num_new):
            held[plan.logical_start + i] = plan.position_start + i
        self.positions[life] = held

    def _check_positions(self, request_id: str, plan: RequestPlan, now: set[int]) -> None:
        """Sinks and recent tokens are the same by position as by index; no two have one."""
        life = (request_id, self.lives[request_id])
        held = {i: position for i, position in self.positions[life].items() if i in now}
        assert len(set(held.values())) == len(held) and max(held.values()) == plan.position_end - 1
        recent = {i for i, position in held.items() if position >= plan.recent_start}
        assert recent == {i for i in now if i >= plan.logical_end - _num_recent(plan)}
        num_sinks = plan.budget.num_sinks
        sinks = {i for i, position in held.items() if position < num_sinks}
        assert sinks == {i for i in now if i < num_sinks}
        self.positions[life] = held

    def _compare(self, request_id: str, plan: RequestPlan, now: set[int]) -> None:
        """Count what the request held before this step, or was given in it, and holds no more."""
        life, before = self.held.get(request_id, (0, set()))
        found = set(range(plan.logical_start))
        before = before & found if life == self.lives[request_id] else found  # no rejected draft
        had = before | set(range(plan.logical_start, plan.logical_end))
        assert now <= had
        self.num_gone += len(had - now)
        self.held[request_id] = (self.lives[request_id], now)


def _num_recent(plan: RequestPlan) -> int:
    """Tokens that are kept after this step because they are recent: more, the longer the output."""
    return plan.budget.recent_at(plan.logical_end - plan.prompt_end)
