# SPDX-License-Identifier: Apache-2.0
"""States of requests in the ledger, and its counts: no torch, no vLLM."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from vllm_h2o.errors import IntegrityError
from vllm_h2o.policy import Budget
from vllm_h2o.scheduler.rules import Rules
from vllm_h2o.wire import RequestPlan


@dataclass(frozen=True)
class Left:
    """Lengths of a finished request from which another may continue.

    Args:
        logical_len: tokens computed.
        resident_len: slots in use.
        restored_end: tokens of its prompt, if a next turn has to rank them without the term whose
            lifetime ends with this one. 0: no term has to go.
        shared_len: slots that its KV heads share, unused ones among them. 0: they share none.
        prompt: tokens [start, end) that were its prompt.

    """

    logical_len: int
    resident_len: int
    restored_end: int = 0
    shared_len: int = 0
    prompt: tuple[int, int] = (0, 0)

    @property
    def is_split(self) -> bool:
        """Whether its KV heads share slots."""
        return self.shared_len > 0

    @property
    def num_slots(self) -> int:
        """Slots whose contents another request needs to continue."""
        return self.shared_len or self.resident_len

    @property
    def num_used(self) -> int:
        """``wire.Saved.num_used``."""
        return 0 if self.is_split else self.resident_len

    def is_followed_by(self, prompt_len: int) -> bool:
        """Whether a request goes on where this one has ended: it adds one token.

        It holds, and evicts, what it would if both were one.

        Args:
            prompt_len: of the request that continues.

        """
        return prompt_len == self.logical_len + 1

    def prompt_of(self, prompt_len: int) -> tuple[int, int]:
        """Tokens [start, end) that count as its prompt; each later one takes a step of its own.

        Chunks of prompts attend to as many tokens in every KV head. So where heads share slots,
        what a prompt adds is computed as if the earlier request had generated it.

        Args:
            prompt_len: of the request that continues.

        """
        if self.is_followed_by(prompt_len):
            return self.prompt
        return self.logical_len, self.logical_len if self.is_split else prompt_len


@dataclass(frozen=True)
class RequestInfo:
    """The lengths and limits that a request brings before it holds pages.

    Args:
        prompt_len: tokens of its prompt; of a resumed request, also the tokens that it had
            generated: all of them are computed again.
        max_len: tokens of its prompt and of all that may follow; None: no limit.
        budget: its own budget; None: the engine's.
        turn: the lengths that it continues from; None: it begins anew.
        ends_with_prompt: whether it is over when the token after its prompt is sampled, and nothing
            goes on from it: what it holds after its prompt is never read.

    """

    prompt_len: int
    max_len: int | None = None
    budget: Budget | None = None
    turn: Left | None = None
    ends_with_prompt: bool = False

    @property
    def prompt(self) -> tuple[int, int]:
        """See :meth:`Left.prompt_of`; of a request that begins anew, its whole prompt."""
        return self.turn.prompt_of(self.prompt_len) if self.turn else (0, self.prompt_len)

    @property
    def prompt_end(self) -> int:
        """One past the last token of :attr:`prompt`."""
        return self.prompt[1]

    def continues_at(self, num_computed: int) -> bool:
        """Whether it continues after ``num_computed`` tokens, and has more of its own."""
        turn = self.turn
        return turn is not None and turn.logical_len == num_computed < self.prompt_len


@dataclass
class RequestState:
    """Lengths of a request after its last committed step.

    Args:
        logical_len: tokens computed.
        resident_len: slots in use.
        held_len: slots whose pages are held.
        prompt_start: of ``RequestInfo.prompt``.
        prompt_end: of ``RequestInfo.prompt``.
        budget: slots of this request.
        fits: whether nothing of it is ever evicted: it is not scored, and may be shared whole.
        shared_end: tokens [0, shared_end) may lie in pages that other requests read: nothing is
            scored or evicted there. 0 without prefix caching.
        first_block_idx: column of the block table's row in which its slots begin.
        is_split: whether KV heads hold unequal numbers of slots.
        grows: whether it keeps every token while there is room; False for good once it has fallen
            back to its budget.
        max_len: ``RequestInfo.max_len``.
        num_unscored: tokens of its last step, if that had drafts: accepted ones, once they are
            known; their queries have not scored yet.
        offset: a token's index less its position.
        ongoing_end: tokens computed until which each step repeats its last one, a token later.
        num_found: tokens that it began with, from the prefix cache or an earlier request.
        turn_start: the same if it continues an earlier request; else 0.
        num_known: ``RequestInfo.prompt_len``.
        ends_with_prompt: ``RequestInfo.ends_with_prompt``.

    """

    logical_len: int
    resident_len: int
    held_len: int
    prompt_end: int
    budget: Budget
    fits: bool = False
    shared_end: int = 0
    first_block_idx: int = 0
    is_split: bool = False
    grows: bool = False
    max_len: int | None = None
    num_unscored: int = 0
    offset: int = 0
    ongoing_end: int = 0
    num_found: int = 0
    turn_start: int = 0
    prompt_start: int = 0
    num_known: int = 0
    ends_with_prompt: bool = False

    @property
    def in_prompt(self) -> bool:
        """Whether the next token is of the prompt, as far as that is computed in chunks."""
        return self.logical_len < self.prompt_end

    @property
    def is_full(self) -> bool:
        """Whether new tokens evict others, now or when the slots that are free again are taken."""
        if self.in_prompt or self.grows or self.ends_with_prompt:
            return False
        if not self.budget.overwrites:
            return self.resident_len < self.logical_len
        return self.resident_len == self.budget.capacity

    def goes_on(self, num_computed: int, num_tokens: int) -> bool:
        """Whether computing tokens [num_computed, num_tokens) repeats its last step."""
        return num_computed == self.logical_len == num_tokens - 1 and num_tokens <= self.ongoing_end

    def go_on(self) -> int:
        """Hold another token. Returns the number of tokens that are evicted for it."""
        self.logical_len += 1
        if self.resident_len == self.budget.capacity:
            return 1
        self.resident_len += 1
        self.held_len = max(self.held_len, self.resident_len)
        return 0

    def max_new(self, rules: Rules) -> int:
        """Most tokens of its next step.

        A token after which survivors are packed, or scores are restored, is computed without
        drafts: this happens after as many tokens as it would without speculation.
        """
        if self.in_prompt:
            return self.prompt_end - self.logical_len
        room = self.budget.capacity - self.resident_len - (0 if self.fits else 1)
        if self.logical_len < (window_end := self.window_end(rules.lifetime)):
            room = min(room, window_end - 1 - self.logical_len)
        return max(min(room, 1 + rules.num_drafts), 1)

    def settled(self, num_computed: int) -> RequestState:
        """The same without the rejected drafts of its last step.

        Args:
            num_computed: tokens computed, without those.

        Raises:
            IntegrityError: when its last step did not end that many tokens later.

        """
        num_rejected = self.logical_len - num_computed
        if not 0 <= num_rejected < self.num_unscored:
            raise IntegrityError(
                f"vLLM counts {num_computed} computed tokens after a step of {self.num_unscored} "
                f"that ends at {self.logical_len}"
            )
        return replace(
            self,
            logical_len=num_computed,
            resident_len=self.resident_len - num_rejected,
            num_unscored=self.num_unscored - num_rejected,
        )

    def extend(self, num_computed: int, info: RequestInfo, budget: Budget, fits: bool) -> bool:
        """Go on with a longer prompt, as with one more chunk of it.

        Args:
            num_computed: tokens computed, as vLLM counts them.
            info: what the request brings now; its prompt begins with all that it had.
            budget: slots that it may hold now.
            fits: whether nothing of it is ever evicted now.

        Returns:
            False if it has to begin anew: its resident tokens were chosen for another budget, were
            not scored because they fitted, or include a token that vLLM has dropped since.

        """
        follows = num_computed == self.logical_len < info.prompt_len
        if not follows or (self.budget, self.fits) != (budget, fits):
            return False
        self.prompt_end, self.max_len, self.ongoing_end = info.prompt_len, info.max_len, 0
        self.ends_with_prompt = info.ends_with_prompt
        return True

    def with_positions(self, plan: RequestPlan, position_limit: int | None) -> RequestPlan:
        """The plan of its next step with an offset; a larger offset renumbers resident tokens.

        Args:
            plan: without an offset.
            position_limit: one past the last position; None: no limit.

        """
        if position_limit is None:
            return plan
        if plan.logical_end - self.offset <= position_limit:
            return replace(plan, offset=self.offset)
        offset = self.logical_len - self.resident_len
        return replace(plan, offset=offset, renumbers_from=self.logical_len - self.offset)

    def window_end(self, lifetime: int) -> int:
        """Tokens computed when a term's lifetime is over; 0: no such term has scored.

        Args:
            lifetime: of the term, in tokens after the prompt; 0: it counts always.

        """
        scored = lifetime > 0 and self.prompt_end - self.prompt_start > 1 and not self.fits
        return self.prompt_end + lifetime if scored else 0

    def restored_end(self, num_tokens: int, lifetime: int) -> int:
        """Tokens of its prompt, if a term's lifetime ends in its next step; else 0.

        Args:
            num_tokens: computed after that step.
            lifetime: as in :meth:`window_end`.

        """
        ends = self.logical_len < self.window_end(lifetime) <= num_tokens
        return self.prompt_end if ends else 0

    def end_of_ongoing(self, plan: RequestPlan, lifetime: int) -> int:
        """Tokens computed until which its steps repeat this one, each a token later; or 0.

        Args:
            plan: of its last step.
            lifetime: as in :meth:`window_end`.

        """
        moves = plan.num_survivors or plan.restored_end or plan.grows or plan.num_new > 1
        if plan.in_prompt or moves:
            return 0
        window_end = self.window_end(lifetime)
        end = window_end - 1 if plan.logical_end < window_end else sys.maxsize
        # The step that takes the last slot selects a victim or packs, unlike those before it.
        left = sys.maxsize if plan.overwrites else self.budget.capacity - 1 - plan.resident_end
        return min(end, plan.logical_end + left)

    def left(self, lifetime: int) -> Left:
        """The lengths from which another request may continue; the prompt is complete.

        Args:
            lifetime: as in :meth:`window_end`.

        """
        counts = self.logical_len < self.window_end(lifetime)
        shared_len = self.held_len if self.is_split else 0
        restored_end = self.prompt_end if counts else 0
        prompt = self.prompt_start, self.prompt_end
        return Left(self.logical_len, self.resident_len, restored_end, shared_len, prompt)

    def num_sharable(self, num_tokens: int) -> int:
        """How many of the first ``num_tokens`` tokens may lie in pages that others read."""
        return num_tokens if self.fits else min(num_tokens, self.shared_end)


@dataclass
class LedgerStats:
    """Counts since the last report; see :class:`~vllm_h2o.wire.PolicyStats`.

    Tokens are counted when a step's plan is taken, because the step is certain to run then; pages
    when they are freed.
    """

    evicted_tokens: int = 0
    packs: int = 0
    pages_freed_early: int = 0
    pressure_packs: int = 0
    pressure_evicted_tokens: int = 0
    continuation_queries: int = 0
    continuation_hits: int = 0
    continuation_misses: int = 0
    continuation_host_hits: int = 0
    continuation_folder_hits: int = 0

    def count(self, plan: RequestPlan) -> None:
        """Count what one request evicts in a step."""
        self.evicted_tokens += plan.num_evicted
        self.packs += plan.num_survivors > 0
        if plan.falls_back:
            self.pressure_packs += 1
            self.pressure_evicted_tokens += plan.num_evicted

    def count_copied(self, place: object, num_tokens: int) -> None:
        """Count tokens that a request continues from, by where they are (wire.Continuation)."""
        self.continuation_host_hits += num_tokens if isinstance(place, int) else 0
        self.continuation_folder_hits += num_tokens if isinstance(place, tuple) else 0

    def count_begun(self, plan: RequestPlan, state: RequestState) -> None:
        """Count all tokens of a request that this step admits, and the tokens it continues from."""
        if plan.logical_start == state.num_found:
            self.continuation_queries += state.num_known
            self.continuation_hits += state.turn_start


def check_span(
    request_id: str, held: RequestState, num_computed: int, num_tokens: int, rules: Rules
) -> None:
    """Check that tokens [num_computed, num_tokens) may follow what a request holds.

    Args:
        request_id: the request.
        held: what it holds.
        num_computed: tokens computed.
        num_tokens: tokens computed after the step.
        rules: of the engine.

    Raises:
        IntegrityError: when the lengths contradict each other.

    """
    if num_computed != held.logical_len or num_tokens <= num_computed:
        raise IntegrityError(
            f"request {request_id}: tokens [{num_computed}, {num_tokens}) are scheduled while "
            f"{held.logical_len} are computed"
        )
    if num_tokens > num_computed + held.max_new(rules):
        raise IntegrityError(
            f"request {request_id}: tokens [{num_computed}, {num_tokens}) cross the end of the "
            f"prompt at {held.prompt_end}, or are more drafts than there is room for"
        )
