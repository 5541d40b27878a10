# SPDX-License-Identifier: Apache-2.0
"""Ways to rank tokens, tried out in simulation before any becomes a policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Variant:
    """A score, and how the slots are divided.

    Args:
        name: in tables.
        recent: share of the kept tokens, beyond the sinks, that are the most recent ones.
        sinks: first tokens that stay.
        power: of the probabilities that are accumulated; 0: none are.
        running_max: accumulate the largest, not the sum.
        skip_recent: a query adds to tokens that are at least so many positions older.
        decay: factor of the accumulated score at each query.
        age: the score is divided by the queries since the token came, to this power.
        diversity: share of the heavy slots that go to keys unlike the mean key (KeyDiff).
        random: rank by a number drawn for each token.
        replay: weight of what a prompt's queries give when rotated to positions past its end.

    """

    name: str
    recent: float = 0.5
    sinks: int = 0
    power: float = 1.0
    running_max: bool = False
    skip_recent: int = 0
    decay: float = 1.0
    age: float = 0.0
    diversity: float = 0.0
    random: bool = False
    replay: float = 0.0


BUILT = (
    Variant("h2o"),
    Variant("h2o sum_squares", power=2),
    Variant("h2o mean_squares", power=2, age=1.0),
    Variant("streaming", recent=1.0, sinks=4, power=0),
    Variant("local", recent=1.0, power=0),
)
"""Variants of the engine's policies, by the names of :data:`benchmarks.quality.plans.POLICIES`."""
CANDIDATES = (
    Variant("recent 1/4", recent=0.25),
    Variant("4 sinks", sinks=4),
    Variant("largest", running_max=True),
    Variant("skip 16", skip_recent=16),
    Variant("decay 0.99", decay=0.99),
    Variant("mean", age=1.0),
    Variant("sum / sqrt(age)", age=0.5),
    Variant("squares / sqrt(age)", power=2, age=0.5),
    Variant("key diversity", power=0, diversity=1.0),
    Variant("half key diversity", diversity=0.5),
    Variant("random", power=0, random=True),
    Variant("replay x 1", power=2, age=1.0, replay=1.0),
    Variant("replay x 4", power=2, age=1.0, replay=4.0),
    Variant("replay x 16", power=2, age=1.0, replay=16.0),
    Variant("replay x 4, recent 0.3", recent=0.3, power=2, age=1.0, replay=4.0),
)


def novelty(
    variant: Variant, key: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank new tokens by their keys alone, or at random.

    Args:
        variant: what is asked for.
        key: [W, H, T, D].
        total: [W, H, D]: sum of the directions of all keys before, of which the mean is taken.

    Returns:
        [W, H, T], larger for what should stay, and the new total.

    """
    if variant.random:
        return torch.rand(key.shape[:3]), total
    if not variant.diversity:
        return torch.zeros(key.shape[:3]), total
    direction = torch.nn.functional.normalize(key, dim=-1)
    total = total + direction.sum(2)
    mean = torch.nn.functional.normalize(total, dim=-1)
    return 1 - torch.einsum("whtd,whd->wht", direction, mean), total


def given(variant: Variant, probs: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
    """Add up the probabilities of a GQA group.

    Args:
        variant: what is asked for.
        probs: [W, H, G, ..., L].
        age: [..., L], broadcastable: positions from token to query.

    Returns:
        [W, H, ..., L].

    """
    if not variant.power:
        return torch.zeros_like(probs[:, :, 0])
    powers = probs if variant.power == 1 else probs.pow(variant.power)
    summed = powers.sum(2)
    return summed * (age >= variant.skip_recent) if variant.skip_recent else summed


def prompt_score(
    variant: Variant, probs: torch.Tensor, shared: dict[object, torch.Tensor] | None = None
) -> torch.Tensor:
    """Score a prompt's tokens by its own queries.

    Args:
        variant: what is asked for.
        probs: [W, H, G, n, n].
        shared: of these probabilities, by what it depends on; filled here.

    Returns:
        [W, H, n].

    """
    length = probs.shape[-1]
    index = torch.arange(length)
    shared = {} if shared is None else shared
    key = (variant.power, variant.skip_recent)
    if key not in shared:
        shared[key] = given(variant, probs, index[:, None] - index)
    received = shared[key]
    if variant.running_max:
        return received.amax(2)
    if variant.decay != 1:
        received = received * (variant.decay ** (length - 1 - index).float())[:, None]
    return received.sum(2)


def replayed(variant: Variant, probs: torch.Tensor) -> torch.Tensor:
    """Score a prompt's tokens by its queries, rotated to positions past its end.

    Args:
        variant: what is asked for; a mean is one over the rotated queries.
        probs: [W, H, G, n, n], of every query over every token.

    Returns:
        [W, H, n].

    """
    length = probs.shape[-1]
    received = variant.replay * given(replace(variant, skip_recent=0), probs, torch.zeros(1)).sum(2)
    since = (length - torch.arange(length)) / length
    return received * since.float() ** variant.age


@dataclass
class Ranks:
    """Rank the slots of one layer.

    Args:
        variant: how to rank.
        capacity: slots.

    """

    variant: Variant
    capacity: int

    def __post_init__(self) -> None:
        rest = self.capacity - 1 - self.variant.sinks
        least = 1 if self.variant.recent > 0 else 0
        self.num_recent = min(rest, max(least, int(self.variant.recent * rest + 0.5)))
        self.num_heavy = rest - self.num_recent

    def ranks(
        self, position: torch.Tensor, score: torch.Tensor, worth: torch.Tensor, end: int
    ) -> torch.Tensor:
        """Rank each slot after ``end`` tokens: [W, H, L] each; the smallest goes first."""
        variant = self.variant
        candidate = (position < end - self.num_recent) & (position >= variant.sinks)
        if variant.age:
            score = score / (end - position).clamp_min(1).float() ** variant.age
        if variant.diversity:
            by_score = int((1 - variant.diversity) * self.num_heavy)
            best = score.masked_fill(~candidate, -1).topk(by_score, dim=-1).indices
            score = worth.scatter(-1, best, torch.inf)
        elif variant.random:
            score = worth
        return score.masked_fill(~candidate, torch.inf)

    def survivors(
        self, position: torch.Tensor, score: torch.Tensor, worth: torch.Tensor
    ) -> torch.Tensor:
        """Choose the survivors of a prompt: [W, H, min(n, C - 1)] indices, in order."""
        length = position.shape[-1]
        if length < self.capacity:
            return torch.arange(length).expand_as(position)
        ranks = self.ranks(position, score, worth, length)
        return ranks.topk(self.capacity - 1, dim=-1).indices.sort(-1).values
