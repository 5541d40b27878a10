# SPDX-License-Identifier: Apache-2.0
"""An eviction policy: its name, its rules and its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vllm_h2o.policy.budget import ALL_RECENT
from vllm_h2o.policy.ranking import Ranking

Split = Literal["none", "heads", "layers"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How tokens are ranked, and the defaults that go with that ranking.

    Args:
        ranking: what ranks the tokens that are neither sinks nor recent. Without terms, position
            alone decides: everything but the sinks is the recent window.
        recent_ratio: fraction of the budget that is recent when the user names none.
        first_recent: recent tokens that are kept when the prompt ends, one more with each token
            after it, up to that fraction. Heads that share slots keep the fraction at once.
        split: which KV heads share slots when the user does not say.
        merge: cosine above which an evicted token is merged when the user names none; 0: none is.

    Raises:
        ValueError: for defaults that are no fraction or no count.

    """

    ranking: Ranking = field(default_factory=Ranking)
    recent_ratio: float = 0.5
    first_recent: int = ALL_RECENT
    split: Split = "none"
    merge: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.recent_ratio <= 1 and 0 <= self.merge < 1 and self.first_recent >= 0):
            raise ValueError(
                f"recent_ratio is in [0, 1], merge in [0, 1), first_recent at least 0: {self}"
            )


@dataclass(frozen=True, kw_only=True)
class Policy(Rule):
    """One eviction policy: its own rule, other rules by a score, and its defaults.

    Args:
        name: the value of ``--kv-policy``.
        summary: one line for ``--help``.
        score: the policy's own rule as the option ``score`` names it; None: it has no other.
        scores: the other rules, by the value of that option.
        fallback: which of them is used when the user names none and the engine rules out the own
            one; None: the engine does not start then.
        num_sink_tokens: sinks when the user names none.
        evicts: False for the policy that keeps every token.

    Raises:
        ValueError: for defaults that are no fraction, no count, or contradict each other.

    """

    name: str
    summary: str
    score: str | None = None
    scores: Mapping[str, Rule] = field(default_factory=dict)
    fallback: str | None = None
    num_sink_tokens: int = 0
    evicts: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name.isidentifier():
            raise ValueError(f"a policy's name is letters, digits and underscores: {self.name!r}")
        if self.num_sink_tokens < 0:
            raise ValueError(f"num_sink_tokens is at least 0: {self}")
        if self.score in self.scores or (self.score is None and self.scores):
            raise ValueError(f"score names the policy's own rule, scores the others: {self}")
        if self.fallback is not None and self.fallback not in self.scores:
            raise ValueError(f"fallback is one of scores: {self}")

    @property
    def rules(self) -> Mapping[str, Rule]:
        """Every rule that the option ``score`` names."""
        return {} if self.score is None else {self.score: self, **self.scores}

    @property
    def keeps_heavy(self) -> bool:
        """Whether a part of the budget goes to the best-ranked tokens."""
        return bool(self.ranking.terms)
