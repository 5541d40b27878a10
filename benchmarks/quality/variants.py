"""Ways to choose what stays, tried out in simulation before any becomes a policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from vllm_h2o.kernels.batch import MEAN_SECOND_PASS


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
        replay: weight of what a prompt's queries give when asked again from behind its end.

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
    Variant("h2o squares", power=2),
    Variant("h2o_mean", power=2, age=1.0),
    Variant("h2o_replay", power=2, age=1.0, replay=MEAN_SECOND_PASS.weight),
    Variant("streaming", recent=1.0, sinks=4, power=0),
    Variant("random", power=0, random=True),
    Variant("local", recent=1.0, power=0),
)
"""What the engine has, too, by the names of :data:`benchmarks.quality.plans.POLICIES`."""
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
    Variant("replay x 1", power=2, age=1.0, replay=1.0),
    Variant("replay x 16", power=2, age=1.0, replay=16.0),
    Variant("replay, recent 0.3", recent=0.3, power=2, age=1.0, replay=MEAN_SECOND_PASS.weight),
)


def novelty(
    variant: Variant, key: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What tokens are worth whatever attends to them, fixed when they come.

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
    """What queries give to tokens.

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
    """What a prompt's queries give to its tokens.

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
    """What a prompt's queries give to its tokens when asked once more, from behind its end.

    Args:
        variant: what is asked for; a mean is one over the queries that are asked again.
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
    """Which of the slots of one layer goes next.

    Args:
        variant: how that is decided.
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
        """[W, H, L] each: what is compared, smallest first to go, when ``end`` are computed."""
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
        """[W, H, min(n, C - 1)] indices of what survives a prompt, in order."""
        length = position.shape[-1]
        if length < self.capacity:
            return torch.arange(length).expand_as(position)
        ranks = self.ranks(position, score, worth, length)
        return ranks.topk(self.capacity - 1, dim=-1).indices.sort(-1).values
