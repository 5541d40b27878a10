"""What the ledger holds of each request, and what it counts. Integers only: no torch, no vLLM."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from vllm_h2o.errors import IntegrityError
from vllm_h2o.policy import Budget
from vllm_h2o.wire import RequestPlan


@dataclass(frozen=True)
class Left:
    """What an earlier request has left, from which one continues.

    Args:
        logical_len: tokens computed.
        num_slots: slots in use, free ones of a victim block included.
        num_free_slots: those.
        restored_end: tokens of its prompt, where they are to be ranked without what its observation
            window gave: its lifetime ends here. 0: they are already.

    """

    logical_len: int
    num_slots: int
    num_free_slots: int = 0
    restored_end: int = 0

    @property
    def resident_len(self) -> int:
        """Slots that a copy takes: it has none that are free."""
        return self.num_slots - self.num_free_slots


@dataclass(frozen=True)
class RequestInfo:
    """What a request brings.

    Args:
        prompt_len: tokens of its prompt. For a resumed request this counts what it had generated,
            too: all of it is computed again.
        max_len: tokens of its prompt and all that may follow; None where nothing limits it.
        seed: its own, if it has one.
        budget: its own, if it has one.
        turn: from what it continues; None: from nothing.

    """

    prompt_len: int
    max_len: int | None = None
    seed: int | None = None
    budget: Budget | None = None
    turn: Left | None = None

    def continues_at(self, num_computed: int) -> bool:
        """Whether it brings so many tokens of an earlier request, and has more of its own."""
        turn = self.turn
        return turn is not None and turn.logical_len == num_computed < self.prompt_len


@dataclass
class RequestState:
    """What a request holds after the last committed step.

    Args:
        logical_len: tokens computed.
        resident_len: slots in use.
        held_len: slots whose pages are held.
        prompt_end: ``RequestInfo.prompt_len``.
        budget: slots of this request.
        seed: of the ``random`` policy.
        fits: whether nothing of it is ever evicted: it is not scored, and all of it may be shared.
        shared_end: tokens [0, shared_end) may lie in pages that others read: nothing is scored or
            evicted there. 0 where prefixes are not shared.
        next_offset: where pages are evicted, the offset in the victim block that the next token
            takes; 0: in another block.
        first_block_idx: column of the block table's row in which its slots begin.
        is_split: whether the KV heads of a layer hold unequal numbers of slots.
        grows: whether it keeps every token for as long as there is room; never again once it has
            fallen back to its budget.
        max_len: ``RequestInfo.max_len``.
        num_unscored: tokens of its last step, where that had drafts: those that were accepted, as
            soon as it is known; their queries have not scored yet.
        offset: what a token's position is less than its index.
        ongoing_end: tokens computed until which each step is as its last one, a token later.
        num_found: tokens that it began with, from one cache or another.
        turn_start: the same, where it continues a conversation; else 0.

    """

    logical_len: int
    resident_len: int
    held_len: int
    prompt_end: int
    budget: Budget
    seed: int
    fits: bool = False
    shared_end: int = 0
    next_offset: int = 0
    first_block_idx: int = 0
    is_split: bool = False
    grows: bool = False
    max_len: int | None = None
    num_unscored: int = 0
    offset: int = 0
    ongoing_end: int = 0
    num_found: int = 0
    turn_start: int = 0

    @property
    def in_prompt(self) -> bool:
        """Whether the next token is of the prompt."""
        return self.logical_len < self.prompt_end

    @property
    def is_full(self) -> bool:
        """Whether every slot that the request may hold is taken: new tokens evict others."""
        if self.in_prompt or self.grows:
            return False
        if self.budget.evict_every > 1:  # some slots are free again as soon as all are taken
            return self.resident_len < self.logical_len
        return self.resident_len == self.budget.capacity

    def goes_on(self, num_computed: int, num_tokens: int) -> bool:
        """Whether computing tokens [num_computed, num_tokens) is as its last step was."""
        return num_computed == self.logical_len == num_tokens - 1 and num_tokens <= self.ongoing_end

    def go_on(self) -> int:
        """Hold another token; how many are evicted for it."""
        self.logical_len += 1
        if self.resident_len == self.budget.capacity:
            return 1
        self.resident_len += 1
        self.held_len = max(self.held_len, self.resident_len)
        return 0

    def max_new(self, num_drafts: int) -> int:
        """Most tokens of its next step: drafts leave the last slot to a token that is certain.

        So survivors are packed in a step without drafts, after as many tokens as without any.

        Args:
            num_drafts: most drafts of a step.

        """
        if self.in_prompt:
            return self.prompt_end - self.logical_len
        room = self.budget.capacity - self.resident_len - (0 if self.fits else 1)
        return max(min(room, 1 + num_drafts), 1)

    def settled(self, num_computed: int) -> RequestState:
        """The same without the drafts that were rejected: of its last step's tokens.

        Args:
            num_computed: tokens computed, without those.

        Raises:
            IntegrityError: when that is not after the first of them, or more than there are.

        """
        num_rejected = self.logical_len - num_computed
        if not 0 <= num_rejected < self.num_unscored:
            raise IntegrityError(
                f"{num_computed} tokens are said to be computed after a step of "
                f"{self.num_unscored} that ends at {self.logical_len}"
            )
        return replace(
            self,
            logical_len=num_computed,
            resident_len=self.resident_len - num_rejected,
            num_unscored=self.num_unscored - num_rejected,
        )

    def extend(self, num_computed: int, info: RequestInfo, budget: Budget, fits: bool) -> bool:
        """Go on with a longer prompt, as if that were one more chunk of it.

        Args:
            num_computed: tokens computed, as vLLM counts them.
            info: what the request brings now; its prompt is all that it had, and more.
            budget: what it may hold now.
            fits: whether nothing of it is ever evicted now.

        Returns:
            Whether it does. Not where what is held was computed for another budget, or not scored,
            because it fitted, or has a token that vLLM has dropped since.

        """
        follows = num_computed == self.logical_len < info.prompt_len
        if not follows or (self.budget, self.fits) != (budget, fits):
            return False
        self.prompt_end, self.max_len, self.ongoing_end = info.prompt_len, info.max_len, 0
        return True

    def with_positions(self, plan: RequestPlan, position_limit: int | None) -> RequestPlan:
        """The plan of its next step, with an offset; a larger one renumbers what it holds.

        Args:
            plan: without.
            position_limit: one past the last position; None: there is none.

        """
        if position_limit is None:
            return plan
        if plan.logical_end - self.offset <= position_limit:
            return replace(plan, offset=self.offset)
        offset = self.logical_len - self.resident_len
        return replace(plan, offset=offset, renumbers_from=self.logical_len - self.offset)

    def window_end(self, lifetime: int) -> int:
        """Tokens computed when what its observation window gave counts no more; 0: there is none.

        Args:
            lifetime: tokens after the prompt for which it counts; 0: for good.

        """
        scored = lifetime > 0 and self.prompt_end - self.turn_start > 1 and not self.fits
        return self.prompt_end + lifetime if scored else 0

    def restored_end(self, num_tokens: int, lifetime: int) -> int:
        """Tokens of its prompt, where the window's lifetime ends in its next step; else 0.

        Args:
            num_tokens: computed after that step.
            lifetime: in tokens after the prompt; 0: for good.

        """
        ends = self.logical_len < self.window_end(lifetime) <= num_tokens
        return self.prompt_end if ends else 0

    def end_of_ongoing(self, plan: RequestPlan, lifetime: int) -> int:
        """Tokens until which its steps are as the one of this plan, each a token later; or 0.

        Args:
            plan: of its last step.
            lifetime: of what an observation window gives, in tokens after the prompt; 0: for good.

        """
        moves = plan.num_survivors or plan.restored_end or plan.grows or plan.num_new > 1
        if plan.in_prompt or moves or self.budget.evict_every > 1:
            return 0
        window_end = self.window_end(lifetime)
        end = window_end - 1 if plan.logical_end < window_end else sys.maxsize
        # The step that takes the last slot selects a victim, unlike those before it.
        left = sys.maxsize if plan.overwrites else plan.capacity - 1 - plan.resident_end
        return min(end, plan.logical_end + left)

    def left(self, block_size: int, lifetime: int) -> Left:
        """What another request may continue from; the prompt is complete.

        Args:
            block_size: slots that are evicted together.
            lifetime: of what an observation window gives, in tokens after the prompt; 0: for good.

        """
        counts = self.logical_len < self.window_end(lifetime)
        return Left(
            self.logical_len,
            self.resident_len,
            -self.next_offset % block_size,
            self.prompt_end if counts else 0,
        )

    def num_sharable(self, num_tokens: int) -> int:
        """Of the first ``num_tokens`` tokens, those that may lie in pages that others read."""
        return num_tokens if self.fits else min(num_tokens, self.shared_end)


@dataclass
class LedgerStats:
    """What has happened since somebody asked last; see :class:`~vllm_h2o.wire.PolicyStats`.

    Tokens are counted when a step's plan is taken: it is certain to run then. Pages, as they go.
    """

    evicted_tokens: int = 0
    packs: int = 0
    pages_freed_early: int = 0
    pressure_packs: int = 0
    pressure_evicted_tokens: int = 0
    continuation_queries: int = 0
    continuation_hits: int = 0

    def count(self, plan: RequestPlan) -> None:
        """What one request gives up in a step."""
        self.evicted_tokens += plan.num_evicted
        self.packs += plan.num_survivors > 0
        if plan.falls_back:
            self.pressure_packs += 1
            self.pressure_evicted_tokens += plan.num_evicted

    def count_begun(self, plan: RequestPlan, state: RequestState) -> None:
        """Of a request that is admitted in this step, its tokens, and those it continues from."""
        if plan.in_prompt and plan.logical_start == state.num_found:
            self.continuation_queries += state.prompt_end
            self.continuation_hits += state.turn_start


def check_span(
    request_id: str, held: RequestState, num_computed: int, num_tokens: int, num_drafts: int
) -> None:
    """Whether tokens [num_computed, num_tokens) may follow what a request holds.

    Args:
        request_id: the request.
        held: what it holds.
        num_computed: tokens computed.
        num_tokens: tokens computed after the step.
        num_drafts: most drafts of a step.

    Raises:
        IntegrityError: when the lengths contradict each other.

    """
    if num_computed != held.logical_len or num_tokens <= num_computed:
        raise IntegrityError(
            f"request {request_id}: tokens [{num_computed}, {num_tokens}) are scheduled while "
            f"{held.logical_len} are computed"
        )
    if num_tokens > num_computed + held.max_new(num_drafts):
        raise IntegrityError(
            f"request {request_id}: tokens [{num_computed}, {num_tokens}) cross the end of the "
            f"prompt at {held.prompt_end}, or are more than one past it and the drafts there is "
            "room for"
        )


def check_position_end(request_id: str, position_end: int, position_limit: int | None) -> None:
    """Whether a step's last token has a position that the model knows.

    Raises:
        IntegrityError: when what is resident and the step's tokens are more than there are.

    """
    if position_limit is not None and position_end > position_limit:
        raise IntegrityError(
            f"request {request_id}: a token would have position {position_end - 1}, and there are "
            f"{position_limit}"
        )


def check_evicts(request_id: str, held: RequestState, num_tokens: int) -> None:
    """Whether a request may lose tokens when token ``num_tokens`` is computed.

    Raises:
        IntegrityError: when all of it was said to fit.

    """
    if held.fits:
        raise IntegrityError(
            f"request {request_id}: token {num_tokens} does not fit into {held.budget.capacity} "
            "slots, and was said to"
        )
