"""Who holds how many tokens: logical and resident length of every request that owns pages.

Integers only: no torch, no vLLM. One request in one step::

    previewed (pure; may be asked twice, and nothing may come of it)
        -> committed (pages were granted)
        -> taken with the step's plan | closed (preempted in the same step, finished, aborted)

Most requests go on as they did: their plan is that of their last step, a token later. They are
neither previewed nor committed, but just go on; and so it is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vllm_h2o.errors import IntegrityError
from vllm_h2o.pages import num_pages
from vllm_h2o.policy import Budget
from vllm_h2o.scheduler.state import (
    LedgerStats,
    RequestInfo,
    RequestState,
    check_evicts,
    check_position_end,
    check_span,
)
from vllm_h2o.wire import RequestPlan, ResidencyPlan, int64


class Ledger:
    """Lengths of all requests that hold pages, and the plan of the step that is being scheduled.

    Args:
        budget: slots of a sequence that brings no budget of its own.
        block_size: slots of a page.
        seed: of the ``random`` policy, for requests without one of their own.
        packs_chunks: whether a prompt is evicted from after each of its chunks, not at its end.
        observation_window: last queries of a prompt that are computed, and score, together.
        scores_window_only: whether no other query of a prompt scores.
        window_lifetime: tokens after a prompt for which what that window gave counts; 0: for good.
        second_pass_chunk: tokens of a prompt whose queries score a second time together; 0: none.
        evicts_blocks: whether a victim is a whole block, filled again in place, and not one token.
        max_blocks_per_request: columns of the block table; None: as many as are needed.
        prefix_caching: whether requests share the pages of a common prefix.
        splits: whether the KV heads of a layer share its slots once a prompt is evicted from.
        under_pressure: whether a request is evicted from only when memory is short.
        num_drafts: most drafts that a step computes past a request's next token.
        position_limit: one past the last position that a token may have; None: there is none.
        continues: whether a request may continue from what another has left: every one is scored.

    Attributes:
        falling_back: requests past their prompts that fall back to their budget when their next
            token is computed.
        is_short: whether prompts that end in this step are packed at once.

    """

    def __init__(
        self,
        budget: Budget,
        block_size: int,
        seed: int = 0,
        packs_chunks: bool = False,
        observation_window: int = 0,
        scores_window_only: bool = True,
        window_lifetime: int = 0,
        second_pass_chunk: int = 0,
        evicts_blocks: bool = False,
        max_blocks_per_request: int | None = None,
        prefix_caching: bool = False,
        splits: bool = False,
        under_pressure: bool = False,
        num_drafts: int = 0,
        position_limit: int | None = None,
        continues: bool = False,
    ) -> None:
        self.budget = budget
        self.block_size = block_size
        self.seed = seed
        self.packs_chunks = packs_chunks
        self.observation_window = observation_window
        self._scores_window_only = scores_window_only and observation_window > 0
        self.window_lifetime = window_lifetime
        self.second_pass_chunk = second_pass_chunk
        self.victim_size = block_size if evicts_blocks else 1
        self.max_blocks_per_request = max_blocks_per_request
        self.prefix_caching = prefix_caching
        self.splits = splits
        self.under_pressure = under_pressure
        self.num_drafts = num_drafts
        self.position_limit = position_limit
        # Else a victim is not always one token, or positions are renumbered.
        self._may_go_on = not (evicts_blocks or num_drafts) and position_limit is None
        self.continues = continues
        self.falling_back: set[str] = set()
        self.is_short = False
        self.stats = LedgerStats()
        self._states: dict[str, RequestState] = {}
        self._step: dict[str, RequestPlan] = {}
        self._ongoing: dict[str, int] = {}  # and how many tokens each evicts

    @property
    def states(self) -> Mapping[str, RequestState]:
        """What every request with pages holds, by request id."""
        return self._states

    def is_scheduled(self, request_id: str) -> bool:
        """Whether a request is in the step that is being scheduled."""
        return request_id in self._step or request_id in self._ongoing

    def num_pages(self, num_slots: int) -> int:
        """Pages that hold ``num_slots`` slots."""
        return num_pages(num_slots, self.block_size)

    def num_row_blocks(self, plan: RequestPlan) -> int:
        """Columns of the block table that a step needs, those of dropped blocks included."""
        needed = plan.first_block_idx + self.num_pages(plan.attended_len)
        start = plan.pack_block_idx or plan.first_block_idx
        return max(needed, start + self.num_pages(plan.held_end))

    def budget_of(self, info: RequestInfo) -> Budget:
        """A request's own, or that of all."""
        return info.budget or self.budget

    def seed_of(self, info: RequestInfo) -> int:
        """A request's own, or that of all."""
        return int64(self.seed if info.seed is None else info.seed)

    def fits(self, info: RequestInfo) -> bool:
        """Whether nothing of a request is ever evicted, nor of one that continues from it."""
        if self.continues:
            return False
        limits = [] if info.max_len is None else [info.max_len]
        if self.max_blocks_per_request is not None:
            # No request outgrows its row, whatever it may ask for.
            limits.append(self.max_blocks_per_request * self.block_size)
        budget = self.budget_of(info)
        return bool(limits) and budget.holds(info.prompt_len, min(limits))

    def shared_end(self, info: RequestInfo) -> int:
        """Tokens of a request that may lie in pages that others read, and yet be evicted from.

        A row has room for a prompt's blocks and, after them, its survivors'; where it is too short,
        the prompt's last blocks are the request's own.
        """
        if not self.prefix_caching or info.prompt_len < self.block_size:
            return 0
        if self.max_blocks_per_request is None:
            return info.prompt_len
        budget = self.budget_of(info)
        left = self.max_blocks_per_request - self.num_pages(budget.capacity)
        return min(info.prompt_len, max(left, 0) * self.block_size)

    def max_cached_tokens(self, info: RequestInfo) -> int:
        """Most tokens that a request may find computed: whole pages.

        The queries that score must be the request's own, unless nothing of it is ever evicted.
        """
        end = info.prompt_len
        if not self.fits(info):
            end = min(self.shared_end(info), max(end - self.observation_window, 0))
        return end // self.block_size * self.block_size

    def align_chunk(
        self, request_id: str, start: int, num_new: int, prompt_len: int, is_cut: bool = False
    ) -> int:
        """As many of the tokens [start, start + num_new) as leave whole what is scored together.

        That is the observation window, and with a second pass ``second_pass_chunk`` tokens or the
        prompt's rest: so what a prompt keeps does not depend on what else a step computes. Of
        drafts, as many as there is room for; none follow a prompt's last token.

        Args:
            request_id: the request.
            start: tokens computed already, or found computed.
            num_new: tokens that the step has room for.
            prompt_len: tokens of the prompt; read when the request holds nothing yet.
            is_cut: whether images allow no more: then the window alone is kept whole.

        """
        held = self._states.get(request_id)
        prompt_end = held.prompt_end if held else prompt_len
        num_new = min(num_new, held.max_new(self.num_drafts) if held else prompt_end - start)
        window_start = max(prompt_end - self.observation_window, 0)
        if self.second_pass_chunk and start < prompt_end and not is_cut:
            whole = min(max(self.second_pass_chunk, self.observation_window), prompt_end - start)
            if window_start < start + whole < prompt_end:
                whole = window_start - start
            return whole if num_new >= whole else 0
        cuts_window = window_start < start + num_new < prompt_end
        return max(window_start - start, 0) if cuts_window else num_new

    def resident_tokens(self, state: RequestState) -> int:
        """Tokens in a request's slots: all of them, but for the free ones of a victim block."""
        return state.resident_len - -state.next_offset % self.victim_size

    def preview(
        self, request_id: str, num_computed: int, num_tokens: int, info: RequestInfo | None
    ) -> RequestPlan:
        """The plan for computing tokens [num_computed, num_tokens). Changes nothing.

        Args:
            request_id: the request.
            num_computed: tokens computed already; must be what the ledger says, or, where the
                request holds nothing yet, what it finds in pages of others.
            num_tokens: tokens computed after this step.
            info: what the request brings; read when it holds nothing yet.

        Raises:
            IntegrityError: when the lengths contradict each other.

        """
        held = self._states.get(request_id) or self._fresh(request_id, info, num_computed)
        num_new, in_prompt = num_tokens - num_computed, held.in_prompt
        check_span(request_id, held, num_computed, num_tokens, self.num_drafts)
        budget, window_start = held.budget, self._window_start(held)
        due = in_prompt and (self.packs_chunks or num_tokens == held.prompt_end)
        # Survivors leave pages that others read, however few tokens there are.
        pack_block_idx = self.num_pages(held.shared_end) if due and not held.fits else 0
        falls_back = held.grows and (self.is_short if due else request_id in self.falling_back)
        end = held.resident_len + num_new
        packs = pack_block_idx > 0 or end > (budget.kept if due else budget.capacity)
        packs = packs and (falls_back if held.grows else due)
        # Who holds no more than its capacity falls back and moves nothing; a short prompt goes on.
        grows = held.grows and (packs or due or not falls_back)
        is_bounded = not in_prompt and not grows
        overwrites = is_bounded and held.resident_len == budget.capacity
        if is_bounded and budget.evict_every > 1:
            packs = end > budget.capacity if held.fits else end == budget.capacity
        if packs or overwrites:
            check_evicts(request_id, held, num_tokens)
        plan = RequestPlan(
            logical_start=num_computed,
            num_new=num_new,
            in_prompt=in_prompt,
            resident_start=held.resident_len,
            capacity=budget.capacity,
            evict_every=budget.evict_every,
            num_survivors=min(budget.kept, end) if packs else 0,
            num_recent=budget.num_recent,
            num_sinks=budget.num_sinks,
            seed=held.seed,
            fits=held.fits,
            scoring_start=window_start if self._scores_window_only else 0,
            window_start=window_start,
            grows=grows,
            next_offset=held.next_offset if overwrites else 0,
            num_free_slots=self.victim_size - 1 - held.next_offset if overwrites else 0,
            first_block_idx=held.first_block_idx,
            pack_block_idx=pack_block_idx,
            num_unscored=held.num_unscored,
            is_split=held.is_split,
            splits=self.splits and packs and end > budget.kept,
            restored_end=held.restored_end(num_tokens, self.window_lifetime),
        )
        return held.with_positions(plan, self.position_limit)

    def commit(self, request_id: str, plan: RequestPlan, info: RequestInfo | None) -> None:
        """Enter a plan, previewed with the same info, whose pages were granted.

        Raises:
            IntegrityError: when the request has been committed in this step already, or there are
                not as many positions.

        """
        self._check_once(request_id)
        # Not when it is previewed: a prompt is asked for whole before it is admitted.
        check_position_end(request_id, plan.position_end, self.position_limit)
        start = plan.logical_start
        held = self._states.get(request_id) or self._fresh(request_id, info, start)
        # Before the prompt's end nothing is freed: a worker's block table only grows meanwhile.
        ends_prompt = plan.logical_end >= held.prompt_end
        if not plan.in_prompt:
            self.falling_back.discard(request_id)
        held_len = plan.held_end
        if not ends_prompt or not plan.num_survivors:
            held_len = max(held.held_len, plan.attended_len, held_len)
        self._step[request_id] = plan
        state = replace(
            held,
            logical_len=plan.logical_end,
            resident_len=plan.resident_end,
            held_len=held_len,
            next_offset=(plan.next_offset + 1) % self.victim_size if plan.overwrites else 0,
            first_block_idx=plan.pack_block_idx or plan.first_block_idx,
            is_split=plan.is_split or plan.splits,
            grows=plan.grows and not plan.num_survivors,
            num_unscored=plan.num_new if plan.has_drafts else 0,
            offset=plan.offset,
        )
        if self._may_go_on:
            state.ongoing_end = state.end_of_ongoing(plan, self.window_lifetime)
        self._states[request_id] = state

    def _check_once(self, request_id: str) -> None:
        if self.is_scheduled(request_id):
            raise IntegrityError(f"request {request_id} is scheduled twice in one step")

    def go_on(self, request_id: str) -> None:
        """Enter another token of a request that goes on, and has the pages for it.

        Raises:
            IntegrityError: when the request is in this step already.

        """
        self._check_once(request_id)
        self._ongoing[request_id] = self._states[request_id].go_on()

    def settle(self, request_id: str, num_computed: int) -> None:
        """Drop the drafts of a request's last step that were rejected; their slots are free.

        Args:
            request_id: the request.
            num_computed: tokens computed, without those.

        Raises:
            IntegrityError: when its last step had no such drafts.

        """
        self._states[request_id] = self._states[request_id].settled(num_computed)

    def close(self, request_id: str) -> None:
        """Forget a request whose pages go back: finished, aborted or preempted."""
        self._states.pop(request_id, None)
        self._step.pop(request_id, None)
        self._ongoing.pop(request_id, None)
        self.falling_back.discard(request_id)

    def take_step(self, num_scheduled_tokens: Mapping[str, int]) -> ResidencyPlan:
        """The plan of the step that has just been scheduled; the next step starts empty.

        Args:
            num_scheduled_tokens: request id -> tokens, as vLLM's scheduler says.

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
        self.stats.evicted_tokens += sum(ongoing.values())
        for request_id, plan in step.items():
            self.stats.count(plan)
            if self.continues:
                self.stats.count_begun(plan, self._states[request_id])
        return ResidencyPlan(step, tuple(ongoing))

    def _window_start(self, held: RequestState) -> int:
        """Position of the observation window's first query; the prompt's end without one."""
        return max(held.prompt_end - self.observation_window, 0)

    def _fresh(self, request_id: str, info: RequestInfo | None, num_cached: int) -> RequestState:
        """The state of a request that holds nothing but what it found, in one cache or another."""
        turn = info.turn if info and info.continues_at(num_cached) else None
        if info is None or (
            turn is None
            and (num_cached > self.max_cached_tokens(info) or num_cached % self.block_size)
        ):
            raise IntegrityError(
                f"request {request_id} holds nothing and brings {info}; {num_cached} of its "
                "tokens are said to be computed"
            )
        fits = self.fits(info)
        resident_len = turn.resident_len if turn else num_cached
        return RequestState(
            logical_len=num_cached,
            resident_len=resident_len,
            held_len=resident_len,
            prompt_end=info.prompt_len,
            budget=self.budget_of(info),
            seed=self.seed_of(info),
            fits=fits,
            shared_end=0 if fits or turn else self.shared_end(info),
            grows=self.under_pressure and not fits,
            max_len=info.max_len,
            num_found=num_cached,
            turn_start=num_cached if turn else 0,
        )
