# SPDX-License-Identifier: Apache-2.0
"""The ledger: logical and resident length of every request that holds pages.

No torch, no vLLM. One request in one step::

    previewed (changes nothing; may be asked twice, and pages may not be granted)
        -> committed (pages were granted)
        -> taken with the step's plan | closed (preempted in the same step, finished, aborted)

Most requests in decode repeat their last step, a token later: they are neither previewed nor
committed, and the workers derive their plans from the last ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vllm_h2o.errors import IntegrityError
from vllm_h2o.pages import num_pages
from vllm_h2o.policy import Budget
from vllm_h2o.scheduler.rules import Rules
from vllm_h2o.scheduler.state import LedgerStats, RequestInfo, RequestState, check_span
from vllm_h2o.wire import RequestPlan, ResidencyPlan


class Ledger:
    """Lengths of all requests that hold pages, and the plan of the step that is being scheduled.

    Args:
        budget: slots of a request that brings no budget of its own.
        block_size: slots of a page.
        rules: of the engine.

    Attributes:
        falling_back: requests past their prompts that fall back to their budget when their next
            token is computed.
        is_short: whether prompts that end in this step are packed at once.
        resumed: most tokens of a chunk of each preempted request whose prompt is packed after each
            chunk when it is computed again.

    """

    def __init__(
        self,
        budget: Budget,
        block_size: int,
        rules: Rules = Rules(),  # noqa: B008 (frozen)
    ) -> None:
        self.budget = budget
        self.block_size = block_size
        self.rules = rules
        self.falling_back: set[str] = set()
        self.is_short = False
        self.resumed: dict[str, int] = {}
        self.stats = LedgerStats()
        self._states: dict[str, RequestState] = {}
        self._step: dict[str, RequestPlan] = {}
        self._ongoing: dict[str, int] = {}  # tokens that each evicts
        self._num_read = 0  # tokens of the step, once more where they are read again

    @property
    def states(self) -> Mapping[str, RequestState]:
        """The state of every request with pages, by request id."""
        return self._states

    def is_scheduled(self, request_id: str) -> bool:
        """Whether a request is in the step that is being scheduled."""
        return request_id in self._step or request_id in self._ongoing

    def num_pages(self, num_slots: int) -> int:
        """Pages that hold ``num_slots`` slots."""
        return num_pages(num_slots, self.block_size)

    def num_row_blocks(self, plan: RequestPlan) -> int:
        """Columns of the block table that a step needs, columns of dropped blocks included."""
        needed = plan.first_block_idx + self.num_pages(plan.attended_len)
        start = plan.pack_block_idx or plan.first_block_idx
        return max(needed, start + self.num_pages(plan.held_end))

    def budget_of(self, info: RequestInfo) -> Budget:
        """A request's own budget, or the engine's."""
        return info.budget or self.budget

    def fits(self, info: RequestInfo) -> bool:
        """Whether nothing is ever evicted from a request, or from one that continues from it."""
        if self.rules.continues:
            return False
        if info.ends_with_prompt and not self.rules.packs_chunks:
            return True
        limits = [] if info.max_len is None else [info.max_len]
        if self.rules.max_blocks_per_request is not None:
            # No request outgrows its row, whatever it may ask for.
            limits.append(self.rules.max_blocks_per_request * self.block_size)
        budget = self.budget_of(info)
        return bool(limits) and budget.holds(info.prompt_len, min(limits))

    def shared_end(self, info: RequestInfo) -> int:
        """Tokens of a request that is evicted from that may lie in pages that others read.

        A row needs room for a prompt's blocks and, after them, the survivors'. If it is too short,
        the prompt's last blocks are the request's own.
        """
        if not self.rules.prefix_caching or info.prompt_len < self.block_size:
            return 0
        if self.rules.max_blocks_per_request is None:
            return info.prompt_len
        budget = self.budget_of(info)
        left = self.rules.max_blocks_per_request - self.num_pages(budget.capacity)
        return min(info.prompt_len, max(left, 0) * self.block_size)

    def max_cached_tokens(self, info: RequestInfo) -> int:
        """Most tokens of a request that the prefix cache may supply: whole pages.

        A request computes the queries that score itself, unless nothing of it is ever evicted.
        """
        end = info.prompt_len
        if not self.fits(info):
            end = min(self.shared_end(info), max(end - self.rules.observation_window, 0))
        return end // self.block_size * self.block_size

    def align_chunk(
        self, request_id: str, start: int, num_new: int, prompt_len: int, is_cut: bool = False
    ) -> int:
        """How many of the tokens [start, start + num_new) the next chunk takes.

        It does not cut what scores together: the observation window, and ``rules.chunk`` tokens or
        the rest of the prompt. So survivors do not depend on what else a step computes. Past the
        prompt it takes as many drafts as there is room for; none follow a prompt's last token.
        Where prompts are read again, a chunk waits until its step has room for both readings.

        Args:
            request_id: the request.
            start: tokens that are computed already, or found in a cache.
            num_new: tokens that the step has room for; tokens that are read again are not counted.
            prompt_len: ``RequestInfo.prompt_end``; read when the request holds nothing yet.
            is_cut: whether images allow no more: then only the window is kept whole.

        """
        held, window = self._states.get(request_id), self.rules.observation_window
        prompt_end = held.prompt_end if held else prompt_len
        num_new = min(num_new, held.max_new(self.rules) if held else max(prompt_end - start, 1))
        window_start, chunk = max(prompt_end - window, 0), self.rules.chunk
        if start < prompt_end and (resumed := self.resumed.get(request_id)):
            num_new, chunk = min(num_new, resumed), min(chunk, resumed)
        room, block = num_new, self.rules.reread_block
        if block:
            room = max(self.rules.max_step_tokens - self._num_read, 0)
            num_new = min(num_new, room)
        if chunk and start < prompt_end and not is_cut:
            whole = min(max(chunk, window), prompt_end - start)
            if window_start < start + whole < prompt_end:
                whole = window_start - start
                if block and (part := window_start % block) < whole:
                    whole -= part  # no block is read in two parts
            # A window may be longer than the half of a step's room that chunk is.
            most = max(2 * chunk, whole)
            needed = min(2 * whole, most) if block and not (held and held.fits) else whole
            return whole if num_new >= whole and room >= needed else 0
        cuts_window = window_start < start + num_new < prompt_end
        return max(window_start - start, 0) if cuts_window else num_new

    def preview(
        self, request_id: str, num_computed: int, num_tokens: int, info: RequestInfo | None
    ) -> RequestPlan:
        """The plan for computing tokens [num_computed, num_tokens). Changes nothing.

        Args:
            request_id: the request.
            num_computed: tokens computed already: as the ledger counts them, or, of a request that
                holds nothing yet, found in a cache.
            num_tokens: tokens computed after this step.
            info: what the request brings; read when it holds nothing yet.

        Raises:
            IntegrityError: when the lengths contradict each other.

        """
        held = self._states.get(request_id) or self._fresh(request_id, info, num_computed)
        check_span(request_id, held, num_computed, num_tokens, self.rules)
        num_new, in_prompt, budget = num_tokens - num_computed, held.in_prompt, held.budget
        ends_prompt = num_tokens == held.prompt_end
        packs_chunks = self.rules.packs_chunks or request_id in self.resumed
        due = in_prompt and (not held.ends_with_prompt if ends_prompt else packs_chunks)
        # Survivors leave pages that other requests read, however few tokens there are.
        pack_block_idx = self.num_pages(held.shared_end) if due and not held.fits else 0
        falls_back = held.grows and (self.is_short if due else request_id in self.falling_back)
        end = held.resident_len + num_new
        num_survivors = budget.survivors(end)
        packs = falls_back if held.grows else due
        # Past its prompt, a request within its capacity falls back and moves nothing.
        evicts = num_survivors < end if due else end > budget.capacity
        packs = packs and (pack_block_idx > 0 or evicts)
        grows = held.grows and (packs or due or not falls_back)
        is_bounded = not in_prompt and not grows
        if is_bounded and not budget.overwrites:
            packs = end > budget.capacity if held.fits else end == budget.capacity
        if held.fits and (packs or (is_bounded and held.resident_len == budget.capacity)):
            raise IntegrityError(
                f"request {request_id}: token {num_tokens} does not fit into {budget.capacity} "
                "slots, but the request was admitted as one that fits"
            )
        # Heads share slots once the whole prompt has been ranked.
        splits = num_survivors < end and (ends_prompt or not in_prompt)
        plan = RequestPlan(
            logical_start=num_computed,
            num_new=num_new,
            prompt_end=held.prompt_end,
            resident_start=held.resident_len,
            budget=budget,
            num_survivors=num_survivors if packs else 0,
            fits=held.fits,
            grows=grows,
            first_block_idx=held.first_block_idx,
            pack_block_idx=pack_block_idx,
            num_unscored=held.num_unscored,
            is_split=held.is_split or (self.rules.splits and packs and splits),
            restored_end=held.restored_end(num_tokens, self.rules.lifetime),
            packs_chunks=packs_chunks,
        )
        return held.with_positions(plan, self.rules.position_limit)

    def commit(self, request_id: str, plan: RequestPlan, info: RequestInfo | None) -> None:
        """Enter a plan, previewed with the same info, whose pages were granted.

        Raises:
            IntegrityError: when the request is in this step already, or needs more positions than
                there are.

        """
        self._check_once(request_id)
        # Not when it is previewed: a prompt is previewed whole before it is admitted.
        limit = self.rules.position_limit
        if limit is not None and plan.position_end > limit:
            raise IntegrityError(
                f"request {request_id}: a token would have position {plan.position_end - 1}, and "
                f"there are {limit}"
            )
        start = plan.logical_start
        held = self._states.get(request_id) or self._fresh(request_id, info, start)
        # Before the prompt's end nothing is freed: a worker's block table only grows meanwhile.
        ends_prompt = plan.logical_end >= held.prompt_end
        if not plan.in_prompt:
            self.falling_back.discard(request_id)
        self._num_read += self._num_read_by(plan)
        held_len = plan.held_end
        if not ends_prompt or not (plan.in_prompt or plan.num_survivors):
            held_len = max(held.held_len, plan.attended_len, held_len)
        self._step[request_id] = plan
        state = replace(
            held,
            logical_len=plan.logical_end,
            resident_len=plan.resident_end,
            held_len=held_len,
            first_block_idx=plan.pack_block_idx or plan.first_block_idx,
            is_split=plan.is_split,
            grows=plan.grows and not plan.num_survivors,
            num_unscored=plan.num_new if plan.has_drafts else 0,
            offset=plan.offset,
        )
        if self.rules.moves_on_alone:
            state.ongoing_end = state.end_of_ongoing(plan, self.rules.lifetime)
        self._states[request_id] = state

    def _check_once(self, request_id: str) -> None:
        if self.is_scheduled(request_id):
            raise IntegrityError(f"request {request_id} is scheduled twice in one step")

    def go_on(self, request_id: str) -> None:
        """Enter another token of a request that repeats its last step, and has the pages for it.

        Raises:
            IntegrityError: when the request is in this step already.

        """
        self._check_once(request_id)
        self._num_read += 1
        self._ongoing[request_id] = self._states[request_id].go_on()

    def settle(self, request_id: str, num_computed: int) -> None:
        """Drop the rejected drafts of a request's last step; their slots are free.

        Args:
            request_id: the request.
            num_computed: tokens computed, without those.

        Raises:
            IntegrityError: when its last step had fewer drafts.

        """
        self._states[request_id] = self._states[request_id].settled(num_computed)

    def close(self, request_id: str) -> None:
        """Forget a request whose pages are freed: finished, aborted or preempted."""
        self._states.pop(request_id, None)
        if plan := self._step.pop(request_id, None):
            self._num_read -= self._num_read_by(plan)
        elif self._ongoing.pop(request_id, None) is not None:
            self._num_read -= 1
        self.falling_back.discard(request_id)
        self.resumed.pop(request_id, None)

    def _num_read_by(self, plan: RequestPlan) -> int:
        """Tokens of a request in the step, once more where they are read again."""
        return plan.num_new * (2 if self.rules.reread_block and plan.may_reread else 1)

    def take_step(self, num_scheduled_tokens: Mapping[str, int]) -> ResidencyPlan:
        """The plan of the step that has just been scheduled; the next step starts empty.

        Args:
            num_scheduled_tokens: tokens by request id, as vLLM schedules them.

        Raises:
            IntegrityError: when vLLM's schedule and the ledger disagree.

        """
        planned = {request_id: plan.num_new for request_id, plan in self._step.items()}
        planned |= dict.fromkeys(self._ongoing, 1)
        if planned != dict(num_scheduled_tokens):
            raise IntegrityError(
                f"vLLM schedules {dict(num_scheduled_tokens)} tokens, the ledger {planned}"
            )
        step, self._step = self._step, {}
        ongoing, self._ongoing = self._ongoing, {}
        self._num_read = 0
        self.stats.evicted_tokens += sum(ongoing.values())
        for request_id, plan in step.items():
            self.stats.count(plan)
            if self.rules.continues:
                self.stats.count_begun(plan, self._states[request_id])
        return ResidencyPlan(step, tuple(ongoing))

    def _fresh(self, request_id: str, info: RequestInfo | None, num_cached: int) -> RequestState:
        """The state of a request that holds only the tokens that it found in a cache."""
        turn = info.turn if info and info.continues_at(num_cached) else None
        if info is None or (
            turn is None
            and (num_cached > self.max_cached_tokens(info) or num_cached % self.block_size)
        ):
            raise IntegrityError(
                f"request {request_id} holds nothing and brings {info}, but vLLM counts "
                f"{num_cached} computed tokens"
            )
        fits, resumed = self.fits(info), request_id in self.resumed
        resident_len = turn.resident_len if turn else num_cached
        return RequestState(
            logical_len=num_cached,
            resident_len=resident_len,
            held_len=resident_len,
            prompt_end=info.prompt_end,
            budget=self.budget_of(info),
            fits=fits,
            is_split=turn is not None and turn.is_split,
            shared_end=0 if fits or turn or resumed else self.shared_end(info),
            grows=self.rules.under_pressure and not (fits or resumed),
            max_len=info.max_len,
            num_found=num_cached,
            turn_start=num_cached if turn else 0,
            prompt_start=info.prompt[0],
            num_known=info.prompt_len,
            ends_with_prompt=info.ends_with_prompt,
        )
