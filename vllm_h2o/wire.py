"""What the scheduler tells the workers: integers only, one :class:`RequestPlan` a request.

The scheduler decides *how many* tokens of a request stay, the worker decides *which*; nothing
travels back, so the plan is the same for every tensor- and pipeline-parallel rank. The front end is
told what has come of it, in numbers: :class:`PolicyStats`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass, fields

NEVER = 1 << 62
"""A position that no query has."""


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request in one step. Logical lengths count tokens, resident lengths count slots in use.

    Args:
        logical_start: tokens computed before this step; the position of the first new token.
        num_new: tokens computed in this step; one past the prompt.
        in_prompt: whether the new tokens belong to the prompt (of a resumed request: to what is
            computed again), within which a token takes a slot of its own.
        resident_start: slots in use before this step; never above ``capacity`` outside the prompt.
        capacity: slots the request may hold after its prompt, C.
        keep_after: tokens that survive this step; 0 means that nothing is packed.
        num_recent: most recent positions that are never victims.
        num_sinks: first positions that are never victims.
        seed: of the ``random`` policy.
        scores_from: position from which on queries add to scores.
        refill: slots of the victim's page that are taken already, where pages are evicted.
        hole: slots of that page that are still empty after this step.
        first_page: page of the block table's row in which the request's slots begin.
        pack_page: page of the row in which they begin once survivors are packed: behind those of
            the prompt, which others share. 0: in place.

    """

    logical_start: int
    num_new: int
    in_prompt: bool
    resident_start: int
    capacity: int
    keep_after: int
    num_recent: int
    num_sinks: int
    seed: int
    scores_from: int = 0
    refill: int = 0
    hole: int = 0
    first_page: int = 0
    pack_page: int = 0

    @property
    def logical_end(self) -> int:
        """Tokens computed after this step."""
        return self.logical_start + self.num_new

    @property
    def overwrites(self) -> bool:
        """Whether the new token takes its victim's slot: the request was full already."""
        return not self.in_prompt and self.resident_start == self.capacity

    @property
    def attended(self) -> int:
        """Slots in use, a hole among them, while this step attends; survivors are packed later."""
        return self.resident_start if self.overwrites else self.resident_start + self.num_new

    @property
    def selects(self) -> bool:
        """Whether a victim is chosen after this step: no slot is left for the next token."""
        return not self.in_prompt and self.attended == self.capacity and not self.hole

    @property
    def num_evicted(self) -> int:
        """Tokens that each layer and KV head gives up in this step: packed away or overwritten.

        Of a victim that is a page all at once, with the first of its slots that is overwritten.
        """
        if self.keep_after:
            return self.attended - self.keep_after
        return 1 + self.hole if self.overwrites and not self.refill else 0

    @property
    def held_end(self) -> int:
        """Slots whose pages stay held after this step, be it the prompt's last or a later one."""
        if self.keep_after == self.capacity - 1:
            return self.capacity
        return self.keep_after or self.attended

    @property
    def resident_end(self) -> int:
        """Slots in use after this step."""
        return self.keep_after or self.attended


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """One step: a plan for each scheduled request, by request id."""

    requests: Mapping[str, RequestPlan]


_PREFIX = "kv_policy:"


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """What the scheduler tells the front end after a step.

    Args:
        evicted_tokens: tokens evicted since the last report; every layer and KV head evicts as
            many, and they are counted once.
        packs: times that survivors were packed since then: prompts, or chunks of them.
        pages_freed_early: pages that requests gave back while they ran, since then.
        requests_at_capacity: requests now whose slots are all taken: a new token evicts one.
        resident_tokens: tokens now in the cache.
        logical_tokens: tokens now that have been computed of the requests that hold pages: what
            stock vLLM would hold.
        saved_bytes: bytes of the pages that stock vLLM would hold for these now, less those of the
            pages that are held; negative where nothing is evicted, for scores and positions.

    """

    evicted_tokens: int
    packs: int
    pages_freed_early: int
    requests_at_capacity: int
    resident_tokens: int
    logical_tokens: int
    saved_bytes: int

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
