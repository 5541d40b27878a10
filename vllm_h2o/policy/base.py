# SPDX-License-Identifier: Apache-2.0
"""An eviction policy: its name, its ranking and its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vllm_h2o.policy.budget import ALL_RECENT
from vllm_h2o.policy.ranking import Ranking

Split = Literal["none", "heads", "layers"]


@dataclass(frozen=True)
class Policy:
    """One eviction policy: how it ranks tokens, and its defaults.

    Args:
        name: the value of ``--kv-policy``.
        summary: one line for ``--help``.
        ranking: what ranks the tokens that are neither sinks nor recent. Without terms, position
            alone decides: everything but the sinks is the recent window.
        scores: other rankings, by the value of the option ``score``.
        score: the name of ``ranking`` among them.
        num_sink_tokens: sinks when the user names none.
        recent_ratio: fraction of the budget that is recent when the user names none.
        first_recent: recent tokens that are kept when the prompt ends, one more with each token
            after it, up to that fraction. Heads that share slots keep the fraction at once.
        split: which KV heads share slots when the user does not say.
        evicts: False for the policy that keeps every token.

    Raises:
        ValueError: for defaults that are no fraction, no count, or contradict each other.

    """

    name: str
    summary: str
    ranking: Ranking = field(default_factory=Ranking)
    scores: Mapping[str, Ranking] = field(default_factory=dict)
    score: str | None = None
    num_sink_tokens: int = 0
    recent_ratio: float = 0.5
    first_recent: int = ALL_RECENT
    split: Split = "none"
    evicts: bool = True

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"a policy's name is letters, digits and underscores: {self.name!r}")
        if not 0 <= self.recent_ratio <= 1 or min(self.num_sink_tokens, self.first_recent) < 0:
            raise ValueError(f"recent_ratio is in [0, 1], numbers of tokens at least 0: {self}")
        if self.score is not None and self.scores.get(self.score) != self.ranking:
            raise ValueError(
                f"score={self.score!r} names another ranking than the policy's: {self}"
            )

    @property
    def keeps_heavy(self) -> bool:
        """Whether a part of the budget goes to the best-ranked tokens."""
        return bool(self.ranking.terms)
