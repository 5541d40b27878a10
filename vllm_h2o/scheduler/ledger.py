"""Who holds how many tokens: logical and resident length of every request that owns pages.

Integers only: no torch, no vLLM. One request in one step::

    previewed (pure; may be asked twice, and nothing may come of it)
        -> committed (pages were granted)
        -> taken into the step's plan | closed (preempted in the same step, finished, aborted)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from vllm_h2o.errors import IntegrityError
from vllm_h2o.policy import Budget
from vllm_h2o.wire import NEVER, RequestPlan, ResidencyPlan


@dataclass(frozen=True)
class Claim:
    """What a request brings.

    Args:
        prompt_len: tokens of its prompt. For a resumed request this counts what it had generated,
            too: all of it is computed again.
        longest: tokens of its prompt, and the most that follow.
        seed: its own, if it has one.
        budget: its own, if it has one.

    """

    prompt_len: int
    longest: int = NEVER
    seed: int | None = None
    budget: Budget | None = None


@dataclass(frozen=True)
class Residency:
    """What a request holds after the last committed step.

    Args:
        logical_len: tokens computed.
        resident_len: slots in use.
        held_len: slots whose pages are held.
        prompt_end: ``Claim.prompt_len``.
        budget: slots of this request.
        seed: of the ``random`` policy.
        refilled: slots of the victim's page that are taken already.
        shared_end: tokens [0, shared_end) may lie in pages that others read: nothing is scored or
            evicted there. 0 where prefixes are not shared, NEVER where all of the request fits:
            then nothing ever is.
        first_page: page of the block table's row in which its slots begin.

    """

    logical_len: int
    resident_len: int
    held_len: int
    prompt_end: int
    budget: Budget
    seed: int
    refilled: int = 0
    shared_end: int = 0
    first_page: int = 0

    @property
    def is_full(self) -> bool:
        """Whether every slot that the request may hold is taken: the next token evicts one."""
        ended = self.logical_len >= self.prompt_end
        return ended and self.resident_len == self.budget.capacity


@dataclass
class Counts:
    """What has happened since somebody asked last; each as in :class:`~vllm_h2o.wire.PolicyStats`.

    Tokens are counted when a step's plan is taken: it is certain to run then. Pages, as they go.
    """

    evicted_tokens: int = 0
    packs: int = 0
    pages_freed_early: int = 0


class Ledger:
    """Lengths of all requests that hold pages, and the plan of the step that is being scheduled.

    Args:
        budget: slots of a sequence that brings no budget of its own.
        block_size: slots of a page.
        seed: of the ``random`` policy, for requests without one of their own.
        packs_chunks: whether a prompt is evicted from after each of its chunks, not at its end.
        observation_window: queries of the prompt that score, the last ones; 0: all of them.
        replay_chunk: tokens of a prompt whose queries are asked again together; 0: none are.
        evicts_pages: whether a victim is a whole page, refilled in place, and not one token.
        row_pages: pages of a block table's row.
        shares: whether requests share the pages of a common prefix.

    """

    def __init__(
        self,
        budget: Budget,
        block_size: int,
        seed: int = 0,
        packs_chunks: bool = False,
        observation_window: int = 0,
        replay_chunk: int = 0,
        evicts_pages: bool = False,
        row_pages: int = NEVER,
        shares: bool = False,
    ) -> None:
        self.budget = budget
        self.block_size = block_size
        self.seed = seed
        self.packs_chunks = packs_chunks
        self.observation_window = observation_window
        self.replay_chunk = replay_chunk
        self.victim_size = block_size if evicts_pages else 1
        self.row_pages = row_pages
        self.shares = shares
        self.counts = Counts()
        self._residencies: dict[str, Residency] = {}
        self._step: dict[str, RequestPlan] = {}

    @property
    def residencies(self) -> Mapping[str, Residency]:
        """What every request with pages holds, by request id."""
        return self._residencies

    @property
    def step(self) -> Mapping[str, RequestPlan]:
        """Plans of the step that is being scheduled, by request id."""
        return self._step

    def num_pages(self, num_slots: int) -> int:
        """Pages that hold ``num_slots`` slots."""
        return -(-num_slots // self.block_size)

    def num_row_pages(self, plan: RequestPlan) -> int:
        """Pages of a block table's row that a step needs, those that were dropped among them."""
        pages = plan.first_page + self.num_pages(plan.attended)
        if not plan.pack_page:
            return pages
        return max(pages, plan.pack_page + self.num_pages(plan.held_end))

    def shared_end(self, claim: Claim) -> int:
        """Tokens of a request that may lie in pages that others read, from its first one on.

        A row has room for a prompt's pages and, behind them, its survivors'; where it is too short,
        the prompt's last pages are the request's own.
        """
        budget = claim.budget or self.budget
        # No request outgrows its row, whatever it may ask for.
        longest = min(claim.longest, self.row_pages * self.block_size)
        if budget.holds(claim.prompt_len, longest):
            return NEVER
        if not self.shares or claim.prompt_len < self.block_size:
            return 0
        behind = self.row_pages - self.num_pages(budget.capacity)
        return min(claim.prompt_len, max(behind, 0) * self.block_size)

    def most_cached(self, claim: Claim) -> int:
        """Most tokens that a request may find computed: whole pages.

        The queries that score must be the request's own, unless nothing of it is ever evicted.
        """
        end = self.shared_end(claim)
        if end != NEVER:
            end = min(end, max(claim.prompt_len - self.observation_window, 0))
        return end // self.block_size * self.block_size

    def uncut(self, request_id: str, start: int, num_new: int, prompt_len: int) -> int:
        """As many of the tokens [start, start + num_new) as leave whole what is scored together.

        That is the observation window, or where queries are asked again, ``replay_chunk`` tokens or
        the prompt's rest: so what a prompt keeps does not depend on what else a step computes.

        Args:
            request_id: the request.
            start: tokens computed already, or found computed.
            num_new: tokens that the step has room for.
            prompt_len: tokens of the prompt; read when the request holds nothing yet.

        """
        held = self._residencies.get(request_id)
        prompt_end = held.prompt_end if held else prompt_len
        if self.replay_chunk and start < prompt_end:
            whole = min(self.replay_chunk, prompt_end - start)
            return whole if num_new >= whole else 0
        window_start = max(prompt_end - self.observation_window, 0)
        if window_start < start + num_new < prompt_end:
            return max(window_start - start, 0)
        return num_new

    def resident_tokens(self, residency: Residency) -> int:
        """Tokens in a request's slots: all of them, but for the hole in a page that is refilled."""
        return residency.resident_len - -residency.refilled % self.victim_size

    def preview(
        self, request_id: str, num_computed: int, num_tokens: int, claim: Claim | None
    ) -> RequestPlan:
        """The plan for computing tokens [num_computed, num_tokens). Changes nothing.

        Args:
            request_id: the request.
            num_computed: tokens computed already; must be what the ledger says, or, where the
                request holds nothing yet, what it finds in pages of others.
            num_tokens: tokens computed after this step.
            claim: what the request brings; read when it holds nothing yet.

        Raises:
            IntegrityError: when the lengths contradict each other.

        """
        held = self._residencies.get(request_id) or self._fresh(request_id, claim, num_computed)
        num_new = num_tokens - num_computed
        in_prompt = num_computed < held.prompt_end
        if num_computed != held.logical_len or num_new < 1:
            raise IntegrityError(
                f"request {request_id}: tokens [{num_computed}, {num_tokens}) are scheduled while "
                f"{held.logical_len} are computed"
            )
        if num_tokens > (held.prompt_end if in_prompt else num_computed + 1):
            raise IntegrityError(
                f"request {request_id}: tokens [{num_computed}, {num_tokens}) cross the end of the "
                f"prompt at {held.prompt_end}, or are more than one past it"
            )
        budget, window = held.budget, self.observation_window
        due = in_prompt and (self.packs_chunks or num_tokens == held.prompt_end)
        # Survivors leave pages that others read, however few tokens there are.
        pack_page = self.num_pages(held.shared_end) if due and held.shared_end != NEVER else 0
        packs = due and (pack_page > 0 or held.resident_len + num_new > budget.kept)
        overwrites = not in_prompt and held.resident_len == budget.capacity
        if held.shared_end == NEVER and (packs or overwrites):
            raise IntegrityError(
                f"request {request_id}: token {num_tokens} does not fit into {budget.capacity} "
                "slots, and was said to"
            )
        scores_from = max(held.prompt_end - window, 0) if window else 0
        return RequestPlan(
            logical_start=num_computed,
            num_new=num_new,
            in_prompt=in_prompt,
            resident_start=held.resident_len,
            capacity=budget.capacity,
            keep_after=min(budget.kept, held.resident_len + num_new) if packs else 0,
            num_recent=budget.num_recent,
            num_sinks=budget.num_sinks,
            seed=held.seed,
            scores_from=NEVER if held.shared_end == NEVER else scores_from,
            refill=held.refilled if overwrites else 0,
            hole=self.victim_size - 1 - held.refilled if overwrites else 0,
            first_page=held.first_page,
            pack_page=pack_page,
        )

    def commit(self, request_id: str, plan: RequestPlan, claim: Claim | None) -> None:
        """Enter a plan, previewed with the same claim, whose pages were granted.

        Raises:
            IntegrityError: when the request has been committed in this step already.

        """
        if request_id in self._step:
            raise IntegrityError(f"request {request_id} is scheduled twice in one step")
        start = plan.logical_start
        held = self._residencies.get(request_id) or self._fresh(request_id, claim, start)
        # Before the prompt's end nothing is freed: a worker's block table only grows meanwhile.
        ends_prompt = plan.logical_end >= held.prompt_end
        held_len = plan.held_end if ends_prompt else max(held.held_len, plan.attended)
        self._step[request_id] = plan
        self._residencies[request_id] = replace(
            held,
            logical_len=plan.logical_end,
            resident_len=plan.resident_end,
            held_len=held_len,
            refilled=(plan.refill + 1) % self.victim_size if plan.overwrites else 0,
            first_page=plan.pack_page or plan.first_page,
        )

    def close(self, request_id: str) -> None:
        """Forget a request whose pages go back: finished, aborted or preempted."""
        self._residencies.pop(request_id, None)
        self._step.pop(request_id, None)

    def take_step(self, num_scheduled_tokens: Mapping[str, int]) -> ResidencyPlan:
        """The plan of the step that has just been scheduled; the next step starts empty.

        Args:
            num_scheduled_tokens: request id -> tokens, as vLLM's scheduler says.

        Raises:
            IntegrityError: when vLLM's schedule and the ledger disagree.

        """
        planned = {request_id: plan.num_new for request_id, plan in self._step.items()}
        if planned != dict(num_scheduled_tokens):
            raise IntegrityError(
                f"vLLM schedules {dict(num_scheduled_tokens)} tokens, the ledger {planned}"
            )
        step, self._step = self._step, {}
        for plan in step.values():
            self.counts.evicted_tokens += plan.num_evicted
            self.counts.packs += plan.keep_after > 0
        return ResidencyPlan(step)

    def _fresh(self, request_id: str, claim: Claim | None, num_cached: int) -> Residency:
        if claim is None or num_cached > self.most_cached(claim) or num_cached % self.block_size:
            raise IntegrityError(
                f"request {request_id} holds nothing and brings {claim}; {num_cached} of its "
                "tokens are said to be computed"
            )
        return Residency(
            logical_len=num_cached,
            resident_len=num_cached,
            held_len=num_cached,
            prompt_end=claim.prompt_len,
            budget=claim.budget or self.budget,
            seed=_int64(self.seed if claim.seed is None else claim.seed),
            shared_end=self.shared_end(claim),
        )


def _int64(value: int) -> int:
    """``value`` modulo 2^64, signed: a request may bring any seed, and tensors hold this."""
    return (value + 2**63) % 2**64 - 2**63
