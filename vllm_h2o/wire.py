# SPDX-License-Identifier: Apache-2.0
"""Messages of the scheduler: plans for the workers, counts for the front end.

The scheduler decides *how many* tokens of a request stay, the worker decides *which*. Nothing
travels back, so the plan is the same for every tensor- and pipeline-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, fields, replace

from vllm_h2o.errors import IntegrityError
from vllm_h2o.policy import Budget


@dataclass(slots=True, kw_only=True)
class RequestPlan:
    """One request in one step. Logical lengths count tokens, resident lengths count slots in use.

    Only :meth:`go_on` changes it, in the copy that a worker keeps from one step to the next.

    Args:
        logical_start: tokens computed before this step; the index of the first new token.
        num_new: tokens computed in this step; past the prompt 1, and drafts, which may be wrong.
        prompt_end: tokens of the prompt; of a resumed request, all that is computed again; of one
            that continues from shared slots, those that it continues from; of one that goes on
            where another has ended, the other's.
        resident_start: slots in use before this step; above the capacity in the prompt alone, or
            while the request ``grows``.
        budget: slots that the request may hold after its prompt, and what they are for.
        num_survivors: tokens that survive this step; 0: nothing is packed.
        fits: whether prompt + max_tokens fit the budget: nothing is ever evicted, nothing scored.
        grows: whether the new token takes a slot of its own, however many there are: with
            ``eviction=pressure``, until the request is packed at the end of such a step.
        first_block_idx: column of the block table's row in which the request's slots begin.
        pack_block_idx: column in which they begin once survivors are packed: after the prompt's
            blocks, which other requests read. 0: in place.
        num_unscored: accepted tokens of the request's last step, which had drafts: their queries
            score before this step's.
        is_split: whether KV heads hold unequal numbers of slots after this step, ``capacity`` on
            average: from the step that packs the prompt on, or that copies from such a request.
        restored_end: after this step the tokens [0, restored_end), a prompt's, are ranked without
            the term whose lifetime is over. 0: not in this step.
        offset: a new token's index less its position: grows when a request is renumbered.
            0: positions are the original ones.
        renumbers_from: before this step the resident tokens, of which the last had position
            renumbers_from - 1, get positions [0, resident_start) in their order, and this step's
            first token follows them. 0: they keep theirs.
        packs_chunks: whether the prompt is evicted from after each of its chunks, not at its end.

    """

    logical_start: int
    num_new: int
    prompt_end: int
    resident_start: int
    budget: Budget
    num_survivors: int = 0
    fits: bool = False
    grows: bool = False
    first_block_idx: int = 0
    pack_block_idx: int = 0
    num_unscored: int = 0
    is_split: bool = False
    restored_end: int = 0
    offset: int = 0
    renumbers_from: int = 0
    packs_chunks: bool = False

    @property
    def logical_end(self) -> int:
        """Tokens computed after this step."""
        return self.logical_start + self.num_new

    @property
    def in_prompt(self) -> bool:
        """Whether the new tokens belong to the prompt, where each takes a slot of its own."""
        return self.logical_start < self.prompt_end

    @property
    def position_start(self) -> int:
        """The position of the first new token."""
        return self.logical_start - self.offset

    @property
    def position_end(self) -> int:
        """One past the position of the last new token."""
        return self.logical_end - self.offset

    @property
    def recent_start(self) -> int:
        """Positions from here on are never victims."""
        return self.position_end - self.budget.recent_at(self.logical_end - self.prompt_end)

    @property
    def has_drafts(self) -> bool:
        """Whether all new tokens but the first are drafts."""
        return not self.in_prompt and self.num_new > 1

    @property
    def may_reread(self) -> bool:
        """Whether a ranking with a second reading reads the new tokens again, in the same step."""
        return self.in_prompt and self.num_new > 1 and not self.fits

    @property
    def _is_bounded(self) -> bool:
        return not self.in_prompt and not self.grows

    @property
    def overwrites(self) -> bool:
        """Whether the new token takes its victim's slot: the request was full already."""
        return self._is_bounded and self.resident_start == self.budget.capacity

    @property
    def attended_len(self) -> int:
        """Slots in use while this step attends; survivors are packed later."""
        return self.resident_start if self.overwrites else self.resident_start + self.num_new

    @property
    def selects(self) -> bool:
        """Whether this step chooses a victim, because no slot is left for the next token."""
        full = self._is_bounded and self.attended_len == self.budget.capacity
        return full and self.budget.overwrites

    @property
    def splits(self) -> bool:
        """Whether this step packs survivors whose slots KV heads share."""
        return self.is_split and self.num_survivors > 0

    @property
    def attends_split(self) -> bool:
        """Whether KV heads hold unequal numbers of slots while this step attends."""
        return self.is_split and not self.num_survivors

    @property
    def falls_back(self) -> bool:
        """Whether survivors are packed past the prompt because memory is short."""
        return not self.in_prompt and self.grows and self.num_survivors > 0

    @property
    def evicts_together(self) -> bool:
        """Whether survivors are packed past the prompt because all slots are taken."""
        return self._is_bounded and self.num_survivors > 0

    @property
    def num_evicted(self) -> int:
        """Tokens that each KV head evicts in this step; the mean if KV heads share slots."""
        if self.num_survivors:
            return self.attended_len - self.num_survivors
        return int(self.overwrites)

    @property
    def held_end(self) -> int:
        """Slots whose pages are held after this step, the prompt's last one or a later one.

        A request that has evicted holds its whole budget: its row of blocks never grows again.
        """
        has_evicted = self.budget.kept <= self.resident_end < self.logical_end
        return self.budget.capacity if has_evicted else self.resident_end

    @property
    def resident_end(self) -> int:
        """Slots in use after this step."""
        return self.num_survivors or self.attended_len

    def go_on(self) -> None:
        """Become the plan of the next step, which repeats this one a token later."""
        if self.resident_start < self.budget.capacity:
            self.resident_start += 1
        self.logical_start += 1


@dataclass(frozen=True, slots=True)
class Continuation:
    """The copy of an earlier request's cache with which a request begins, before a step.

    Args:
        source: ids of the earlier request's blocks, and then one of each group of layers with
            states; none where the copy is elsewhere.
        blocks: ids of the request's own first blocks, and then those of its states.
        num_slots: slots in use; every slot holds a token, unless heads share them.
        restored_end: from now on the tokens [0, restored_end), a prompt's, are ranked without the
            term whose lifetime is over. 0: nothing changes.
        keeps_slots: whether each token keeps its slot: KV heads share them, or the request goes on
            where the earlier one has ended. Else they are put in order of position.
        place: number of the copy in host memory, or names of the files that hold it, one of each
            worker, which stay open until the step has ended; None: it is in blocks.

    """

    source: tuple[int, ...]
    blocks: tuple[int, ...]
    num_slots: int
    restored_end: int = 0
    keeps_slots: bool = False
    place: int | tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """The copy of an ended request's cache, before a step takes its blocks.

    Args:
        place: its number in host memory; a text: the beginning of its files' names, see files.py.
        source: ids of the blocks, and then those of its states; or its number in host memory.
        num_used: slots in use of each KV head: what is in later ones is not copied. 0: heads share
            them, and use all.
        header: of the files.
        is_awaited: whether an answer waits for the files; else the step does not.

    """

    place: int | str
    source: tuple[int, ...] | int
    num_used: int = 0
    header: str = ""
    is_awaited: bool = False


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """One step: a plan for each scheduled request.

    Args:
        requests: plans by request id, except of ongoing requests.
        ongoing: requests whose plan repeats their last one, a token later.
        continued: requests that begin with a copy of another's cache. Copies come first, and all of
            them are read before any is written.
        saved: caches that are copied to host memory or to files, before those copies.
        dropped: numbers of copies in host memory that end with this step, which may read them.

    """

    requests: Mapping[str, RequestPlan]
    ongoing: Iterable[str] = ()
    continued: Mapping[str, Continuation] = field(default_factory=dict)
    saved: Sequence[Saved] = ()
    dropped: Sequence[int] = ()


class Plans:
    """The last plan of each request: a worker derives the plans of ongoing requests from it."""

    def __init__(self) -> None:
        self._last: dict[str, RequestPlan] = {}

    def complete(self, plan: ResidencyPlan, gone: Iterable[str] = ()) -> ResidencyPlan:
        """Add the plans of ongoing requests to a step. They change in the next step.

        Args:
            plan: the plan of a step; every step comes here once, in order.
            gone: requests that have ended.

        Raises:
            IntegrityError: when an ongoing request has no plan.

        """
        for request_id in gone:
            self._last.pop(request_id, None)
        # The sender may keep its own plans.
        whole = {request_id: copy(new) for request_id, new in plan.requests.items()}
        self._last |= whole
        for request_id in plan.ongoing:
            last = self._last.get(request_id)
            if last is None:
                raise IntegrityError(f"request {request_id} is ongoing, but has no plan")
            last.go_on()
            whole[request_id] = last
        return replace(plan, requests=whole, ongoing=())


_PREFIX = "kv_policy:"


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """Counts since the last report, and current levels: from the scheduler to the front end.

    Args:
        evicted_tokens: tokens evicted since the last report. Each layer and, on average, each KV
            head evicts this number; they are counted once.
        packs: compactions since then: at a prompt's end, after its chunks, or during decode.
        pages_freed_early: pages that requests freed while they ran, since then.
        pressure_packs: compactions since then of requests that fell back to their budget because
            memory was short.
        pressure_evicted_tokens: tokens evicted by those compactions.
        requests_at_capacity: requests now whose new tokens evict others.
        resident_tokens: tokens now in the cache.
        logical_tokens: tokens now computed of the requests that hold pages: stock vLLM would hold
            all of them.
        saved_bytes: bytes of the pages that stock vLLM would hold now, less bytes of the pages that
            are held. Negative if nothing is evicted, because of scores and positions.
        continuation_queries: with continuation, tokens of the requests that were admitted since the
            last report.
        continuation_hits: tokens among them that were not computed again.
        continuation_misses: later turns among these requests that might have continued from an
            earlier one and did not.
        continuation_host_hits: tokens of continuation_hits that host memory held.
        continuation_folder_hits: tokens of continuation_hits that files held.
        continuation_folder_saves: entries that were sent to files since the last report.
        continuation_folder_drops: prompts whose files are gone since then, whoever removed them.
        continuation_host_saves: entries that were copied to host memory since the last report.
        continuation_host_drops: entries that host memory dropped for others since then.
        continuation_host_bytes: bytes of the entries now in the host memory of one worker.

    """

    evicted_tokens: int
    packs: int
    pages_freed_early: int
    pressure_packs: int
    pressure_evicted_tokens: int
    requests_at_capacity: int
    resident_tokens: int
    logical_tokens: int
    saved_bytes: int
    continuation_queries: int = 0
    continuation_hits: int = 0
    continuation_misses: int = 0
    continuation_host_hits: int = 0
    continuation_host_saves: int = 0
    continuation_host_drops: int = 0
    continuation_host_bytes: int = 0
    continuation_folder_hits: int = 0
    continuation_folder_saves: int = 0
    continuation_folder_drops: int = 0

    def put_into(self, carrier: MutableMapping[str, int]) -> None:
        """Add the numbers to a mapping that vLLM sends."""
        carrier.update({_PREFIX + name: value for name, value in asdict(self).items()})

    @classmethod
    def take_from(cls, carrier: MutableMapping[str, int]) -> PolicyStats | None:
        """Take the numbers out again; None if there are none."""
        names = [field.name for field in fields(cls)]
        if _PREFIX + names[0] not in carrier:
            return None
        return cls(**{name: carrier.pop(_PREFIX + name) for name in names})
