"""What the scheduler tells the workers: integers only, one :class:`RequestPlan` a request.

The scheduler decides *how many* tokens of a request stay, the worker decides *which*; nothing
travels back, so the plan is the same for every tensor- and pipeline-parallel rank. The front end is
told what has come of it, in numbers: :class:`PolicyStats`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from copy import copy
from dataclasses import asdict, dataclass, field, fields

from vllm_h2o.errors import IntegrityError


@dataclass(slots=True, kw_only=True)
class RequestPlan:
    """One request in one step. Logical lengths count tokens, resident lengths count slots in use.

    It changes for those alone who keep it from one step to the next, by :meth:`go_on`.

    Args:
        logical_start: tokens computed before this step; the index of the first new token.
        num_new: tokens computed in this step; past the prompt 1, and drafts, which may be wrong.
        in_prompt: whether the new tokens belong to the prompt (of a resumed request: to what is
            computed again), within which a token takes a slot of its own.
        resident_start: slots in use before this step; above ``capacity`` in the prompt alone, or
            while the request ``grows``.
        capacity: slots the request may hold after its prompt, C, or C - 1 + ``evict_every``.
        evict_every: tokens that are evicted at a time past the prompt. With 1 a token overwrites
            its victim; with more, survivors are packed when ``capacity`` slots are taken.
        num_survivors: tokens that survive this step; 0 means that nothing is packed.
        num_recent: most recent positions that are never victims.
        num_sinks: first positions that are never victims.
        seed: of the ``random`` policy.
        fits: whether prompt + max_tokens fit the budget: nothing is ever evicted, nothing scored.
        grows: whether the new token takes a slot of its own, however many there are: with
            ``eviction=pressure``, until the request is packed at the end of such a step.
        scoring_start: position from which on queries add to scores.
        window_start: position from which on queries are of the observation window.
        next_offset: where pages are evicted, the offset in the victim block that the new token
            takes.
        num_free_slots: slots of that block that are still free after this step.
        first_block_idx: column of the block table's row in which the request's slots begin.
        pack_block_idx: column in which they begin once survivors are packed: after the prompt's
            blocks, which others read. 0: in place.
        num_unscored: tokens of the request's last step, which had drafts, that were accepted: their
            queries score before this step's.
        is_split: whether the KV heads of a layer hold unequal numbers of slots, ``capacity`` on
            average; then the request is at its capacity for good.
        splits: whether they do once survivors are packed.
        restored_end: after this step the tokens [0, restored_end), a prompt's, are ranked without
            what its observation window gave: its lifetime is over. 0: not in this step.
        offset: what a new token's position is less than its index: grows when a request is
            renumbered. 0: positions are the original ones.
        renumbers_from: before this step the resident tokens, of which the last had position
            renumbers_from - 1, get positions [0, resident_start) in their order, and this step's
            first token follows them. 0: they keep theirs.

    """

    logical_start: int
    num_new: int
    in_prompt: bool
    resident_start: int
    capacity: int
    evict_every: int = 1
    num_survivors: int = 0
    num_recent: int = 0
    num_sinks: int = 0
    seed: int = 0
    fits: bool = False
    grows: bool = False
    scoring_start: int = 0
    window_start: int = 0
    next_offset: int = 0
    num_free_slots: int = 0
    first_block_idx: int = 0
    pack_block_idx: int = 0
    num_unscored: int = 0
    is_split: bool = False
    splits: bool = False
    restored_end: int = 0
    offset: int = 0
    renumbers_from: int = 0

    @property
    def logical_end(self) -> int:
        """Tokens computed after this step."""
        return self.logical_start + self.num_new

    @property
    def position_start(self) -> int:
        """The position of the first new token."""
        return self.logical_start - self.offset

    @property
    def position_end(self) -> int:
        """One past the position of the last."""
        return self.logical_end - self.offset

    @property
    def position_seed(self) -> int:
        """With it a position draws the random score that its token's index draws with ``seed``.

        Scores are drawn of ``seed * a + position * b`` modulo 2^64: see ``random_score`` in the
        reference. Else a text whose positions roll would draw the same ones over and over.
        """
        return int64(self.seed + self.offset * _SEEDS_PER_POSITION)

    @property
    def recent_start(self) -> int:
        """Positions from here on are never victims."""
        return self.position_end - self.num_recent

    @property
    def has_drafts(self) -> bool:
        """Whether only the first of the new tokens is certain."""
        return not self.in_prompt and self.num_new > 1

    @property
    def _is_bounded(self) -> bool:
        return not self.in_prompt and not self.grows

    @property
    def kept(self) -> int:
        """Tokens that survive an eviction."""
        return self.capacity - self.evict_every

    @property
    def overwrites(self) -> bool:
        """Whether the new token takes its victim's slot: the request was full already."""
        return self._is_bounded and self.resident_start == self.capacity

    @property
    def attended_len(self) -> int:
        """Slots in use, free ones included, while this step attends; survivors are packed later."""
        return self.resident_start if self.overwrites else self.resident_start + self.num_new

    @property
    def selects(self) -> bool:
        """Whether a victim is chosen after this step: no slot is left for the next token."""
        full = self._is_bounded and self.attended_len == self.capacity
        return full and self.evict_every == 1 and not self.num_free_slots

    @property
    def falls_back(self) -> bool:
        """Whether survivors are packed past the prompt, because memory is short."""
        return not self.in_prompt and self.grows and self.num_survivors > 0

    @property
    def evicts_together(self) -> bool:
        """Whether survivors are packed past the prompt, because ``evict_every`` tokens came."""
        return self._is_bounded and self.num_survivors > 0

    @property
    def num_evicted(self) -> int:
        """Tokens that each layer and KV head gives up in this step: packed away or overwritten.

        Where heads share a layer's slots, on average.
        Of a victim that is a page all at once, with the first of its slots that is overwritten.
        """
        if self.num_survivors:
            return self.attended_len - self.num_survivors
        return 1 + self.num_free_slots if self.overwrites and not self.next_offset else 0

    @property
    def held_end(self) -> int:
        """Slots whose pages stay held after this step, be it the prompt's last or a later one."""
        if self.num_survivors == self.kept:
            return self.capacity
        return self.num_survivors or self.attended_len

    @property
    def resident_end(self) -> int:
        """Slots in use after this step."""
        return self.num_survivors or self.attended_len

    def go_on(self) -> None:
        """Become the plan of the next step, of a request that goes on as it did: a token later."""
        if self.resident_start < self.capacity:
            self.resident_start += 1
        self.logical_start += 1


@dataclass(frozen=True, slots=True)
class Continuation:
    """What one request begins with, before a step: a copy of what an earlier one has left.

    Args:
        source: ids of the pages that hold it.
        blocks: ids of the request's own first pages.
        num_slots: slots of it that were in use, free ones included.
        num_free_slots: where pages are evicted, slots of the victim block that were free.
        restored_end: the tokens [0, restored_end), a prompt's, are ranked without what its
            observation window gave from now on. 0: nothing changes.

    """

    source: tuple[int, ...]
    blocks: tuple[int, ...]
    num_slots: int
    num_free_slots: int = 0
    restored_end: int = 0


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """One step: a plan for each scheduled request.

    Args:
        requests: by request id, but for those that go on.
        ongoing: requests whose plan is that of their last step, a token later.
        continued: requests that begin with the cache of another; copied before all else, and read
            before anything is written.

    """

    requests: Mapping[str, RequestPlan]
    ongoing: Iterable[str] = ()
    continued: Mapping[str, Continuation] = field(default_factory=dict)


class Plans:
    """The last plan of each request, kept by whoever is told of those that change alone."""

    def __init__(self) -> None:
        self._last: dict[str, RequestPlan] = {}

    def complete(self, plan: ResidencyPlan, gone: Iterable[str] = ()) -> ResidencyPlan:
        """The same step with every request's plan; those of ongoing ones change in the next step.

        Args:
            plan: of each step, in order.
            gone: requests that have ended.

        Raises:
            IntegrityError: when a request goes on that has no plan.

        """
        for request_id in gone:
            self._last.pop(request_id, None)
        # Those that are told may be the sender's.
        whole = {request_id: copy(new) for request_id, new in plan.requests.items()}
        self._last |= whole
        for request_id in plan.ongoing:
            last = self._last.get(request_id)
            if last is None:
                raise IntegrityError(f"request {request_id} goes on, and has no plan")
            last.go_on()
            whole[request_id] = last
        return ResidencyPlan(whole, continued=plan.continued)


_SEEDS_PER_POSITION = 0xD6E8FEB86659FD93 * pow(0x9E3779B97F4A7C15, -1, 1 << 64) % (1 << 64)
"""b / a."""


def int64(value: int) -> int:
    """``value`` modulo 2^64, signed: a request may bring any seed, and tensors hold this."""
    return (value + 2**63) % 2**64 - 2**63


_PREFIX = "kv_policy:"


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """What the scheduler tells the front end after a step.

    Args:
        evicted_tokens: tokens evicted since the last report; every layer evicts as many, and so
            does each KV head, on average; they are counted once.
        packs: times that survivors were packed since then: at a prompt's end, after chunks of it,
            or later.
        pages_freed_early: pages that requests gave back while they ran, since then.
        pressure_packs: packs past a prompt since then: of requests that fell back to their
            budget because memory was short.
        pressure_evicted_tokens: tokens evicted by those.
        requests_at_capacity: requests now whose slots are all taken: a new token evicts one, or
            each ``evict_every``-th as many.
        resident_tokens: tokens now in the cache.
        logical_tokens: tokens now that have been computed of the requests that hold pages: what
            stock vLLM would hold.
        saved_bytes: bytes of the pages that stock vLLM would hold for these now, less those of the
            pages that are held; negative where nothing is evicted, for scores and positions.
        continuation_queries: tokens of the requests that were admitted since the last report, where
            conversations are continued.
        continuation_hits: of those, tokens that were not computed again.

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

    def put_into(self, carrier: MutableMapping[str, int]) -> None:
        """Add the numbers to a mapping that travels anyway."""
        carrier.update({_PREFIX + name: value for name, value in asdict(self).items()})

    @classmethod
    def take_from(cls, carrier: MutableMapping[str, int]) -> PolicyStats | None:
        """Take the numbers out again; None where there are none."""
        names = [field.name for field in fields(cls)]
        if _PREFIX + names[0] not in carrier:
            return None
        return cls(**{name: carrier.pop(_PREFIX + name) for name in names})
