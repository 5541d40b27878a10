"""The policy's configuration: frozen, validated, and read from ``additional_config`` here alone."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from fractions import Fraction
from typing import Any, TypeGuard

from vllm_h2o.errors import ConfigError
from vllm_h2o.options.parsing import carried_options, named_options
from vllm_h2o.policy import POLICIES, Budget, Policy, ScoreKind, split_budget
from vllm_h2o.policy.budget import minimum_slots

_CHOICES = {
    "budget_basis": ("max_model_len", "prompt", "request"),
    "granularity": ("token", "block"),
    "prefill": ("full", "window", "chunked"),
    "score": ("sum", "sum_squares", "mean", "mean_squares", "replay"),
    "kernels": ("auto", "native", "torch"),
}
"""Field -> the values that it takes."""

_COUNTS = (
    "min_budget",
    "num_sink_tokens",
    "protect_prompt_tokens",
    "observation_window",
    "score_skip_recent",
    "seed",
)
"""Fields that are whole numbers."""


@dataclass(frozen=True)
class KVPolicyConfig:
    """What a user may set.

    Args:
        name: policy: h2o, h2o_mean, h2o_replay, streaming, local, random or full.
        budget: tokens a sequence may hold. An int is that many slots; a float in (0, 1] is that
            share of ``budget_basis``; ``full`` is every token. Rounded up to whole pages. A request
            may bring its own, as ``kv_budget``.
        budget_basis: what a share is a share of: ``max_model_len``, a request's ``prompt``, or the
            ``request``, which is its prompt and its max_tokens.
        min_budget: fewest slots, whatever the share comes to.
        max_budget: most that a request may ask for, given like ``budget``; None: anything.
        recent_ratio: share of the budget, beyond the sinks, that is the recent window, in [0, 1].
        num_sink_tokens: first tokens that are never evicted; None is the policy's own default.
        protect_prompt_tokens: first tokens of a prompt that are never evicted; those of a shorter
            prompt all.
        granularity: what is evicted at a time: a ``token``, or a ``block``, a page's tokens.
        prefill: when a prompt is evicted from: ``full``, once, at its end; ``window``, likewise,
            scored by its last queries alone; ``chunked``, after each chunk of it.
        observation_window: those last queries.
        score: what ranks: the ``sum`` of probabilities or ``sum_squares``; ``mean`` and
            ``mean_squares`` divide them by the queries since the token was stored; ``replay`` is
            ``mean_squares``, and in a prompt that of its queries, asked again from behind it; None
            is the policy's own default.
        score_skip_recent: a query scores tokens that are at least so many positions older; one that
            is asked again scores all.
        seed: of the ``random`` policy, for requests that bring no seed of their own.
        kernels: on a CPU ``native`` (C++) or ``torch``; ``auto`` takes the fastest that are there.

    Raises:
        ConfigError: for any value that cannot be used.

    """

    name: str = "h2o"
    budget: int | float | str = 0.2
    budget_basis: str = "max_model_len"
    min_budget: int = 0
    max_budget: int | float | str | None = None
    recent_ratio: float = 0.5
    num_sink_tokens: int | None = None
    protect_prompt_tokens: int = 0
    granularity: str = "token"
    prefill: str = "full"
    observation_window: int = 32
    score: str | None = None
    score_skip_recent: int = 0
    seed: int = 0
    kernels: str = "auto"

    def __post_init__(self) -> None:
        self._check_name()
        self._check_budget("budget", self.budget)
        if self.max_budget is not None:
            self._check_budget("max_budget", self.max_budget)
        for field in _COUNTS:
            self._check_count(field)
        if not _is_number(self.recent_ratio) or not 0 <= self.recent_ratio <= 1:
            raise ConfigError(
                f"recent_ratio={self.recent_ratio!r}",
                "a share of the budget is a number in [0, 1]",
                "there is no such share",
                "give a number in [0, 1]; 0.5 is the paper's",
            )
        for field, works in _CHOICES.items():
            self._check_choice(field, works)
        self._check_unread()
        self._check_together()
        self._check_size()

    @property
    def policy(self) -> Policy:
        """The policy by its name."""
        return POLICIES[self.name]

    @property
    def num_sinks(self) -> int:
        """First tokens that are never evicted, of a prompt that is long enough."""
        return max(self._own_sinks, self.protect_prompt_tokens)

    @property
    def score_power(self) -> int:
        """Of the probabilities that are added to scores; 0 where attention adds nothing."""
        if self.policy.score is not ScoreKind.SUM:
            return 0
        return 2 if self._own_score.endswith("_squares") or self.score_replays else 1

    @property
    def score_by_age(self) -> bool:
        """Whether scores are ranked as means over the queries since a token was stored."""
        return self._own_score.startswith("mean") or self.score_replays

    @property
    def score_replays(self) -> bool:
        """Whether a prompt's queries are asked again, from behind its end."""
        return self._own_score == "replay"

    @property
    def shares_prefixes(self) -> bool:
        """Whether what survives of a prompt follows from what each request computes itself.

        A prefix that is found in the cache is not computed again: its queries cannot score.
        """
        scored_late = self.prefill == "window" and self.observation_window > 1
        return scored_late or (self.policy.score is not ScoreKind.SUM and self.prefill == "full")

    @property
    def _own_score(self) -> str:
        return self.policy.default_score if self.score is None else self.score

    @property
    def effective_recent_ratio(self) -> float:
        """Share of the budget, beyond the sinks, that is the recent window."""
        return self.recent_ratio if self.policy.keeps_heavy else 1.0

    def resolve(self, max_model_len: int, block_size: int) -> Budget:
        """The budget in slots: of the longest sequence, where it depends on the request.

        Args:
            max_model_len: longest sequence, in tokens.
            block_size: slots of a page.

        Raises:
            ConfigError: when a share comes to fewer slots than sinks + recent + 1.

        """
        slots = self._slots(self.budget, max_model_len, max_model_len)
        meaning = f"that is {slots} slots of max_model_len={max_model_len}"
        self._check_slots(slots, meaning, self.num_sinks)
        budget = split_budget(slots, block_size, self.effective_recent_ratio, self.num_sinks)
        if self.granularity == "block":
            self._check_pages(budget, block_size, max_model_len)
        return budget

    def resolve_request(
        self,
        max_model_len: int,
        block_size: int,
        prompt_len: int,
        max_tokens: int,
        asked: int | float | str | None = None,
    ) -> Budget | None:
        """The budget of one request; None where it is that of every request.

        A share of this configuration that comes to less than sinks, a recent token and the next one
        is lifted to that.

        Args:
            max_model_len: longest sequence, in tokens.
            block_size: slots of a page.
            prompt_len: tokens of the prompt.
            max_tokens: most tokens that follow.
            asked: the request's own budget; a share is one of ``budget_basis``.

        Raises:
            ConfigError: when the budget that is asked for cannot be used.

        """
        num_sinks = max(self._own_sinks, min(self.protect_prompt_tokens, prompt_len))
        if asked is None and self.budget_basis == "max_model_len" and num_sinks == self.num_sinks:
            return None
        own = self if asked is None else self._with(asked)
        whole = {"prompt": prompt_len, "request": prompt_len + max_tokens}
        basis = whole.get(self.budget_basis, max_model_len)
        slots = self._slots(own.budget, basis, max_model_len)
        if asked is None:
            slots = max(slots, minimum_slots(self.effective_recent_ratio, num_sinks))
        else:
            own._check_slots(slots, f"that is {slots} slots", num_sinks)
            own._check_cap(slots, basis, max_model_len)
        budget = split_budget(slots, block_size, self.effective_recent_ratio, num_sinks)
        if self.granularity == "block" and asked is not None:
            own._check_pages(budget, block_size, max_model_len)
        return budget

    def _with(self, asked: int | float | str) -> KVPolicyConfig:
        """This with the budget of a request, checked like its own."""
        basis = self.budget_basis if isinstance(asked, float) else type(self).budget_basis
        return replace(self, budget=asked, budget_basis=basis)

    def _slots(self, budget: int | float | str, whole: int, max_model_len: int) -> int:
        """What a budget comes to, as a share of ``whole`` or as it stands."""
        if not self.policy.evicts or isinstance(budget, str):
            return max_model_len
        # As it is written: in floating point, 0.07 of 1600 is a hair, and so a page, above 112.
        written = Fraction(str(budget))
        slots = math.ceil(written * whole if isinstance(budget, float) else written)
        return min(max(slots, self.min_budget), max_model_len)

    @property
    def _own_sinks(self) -> int:
        if self.num_sink_tokens is not None:
            return self.num_sink_tokens
        return self.policy.default_num_sink_tokens

    def to_dict(self) -> dict[str, Any]:
        """The plain form that ``additional_config`` carries."""
        return asdict(self)

    @classmethod
    def from_options(cls, name: str | None, options: object) -> KVPolicyConfig:
        """From ``--kv-policy NAME`` and ``--kv-policy-config '{...}'``, either of them optional."""
        return cls(**named_options(name, options, [f.name for f in fields(cls)]))

    @classmethod
    def from_additional_config(cls, additional_config: object) -> KVPolicyConfig | None:
        """From vLLM's ``additional_config``; None when no policy is asked for."""
        options = carried_options(additional_config)
        if options is None:
            return None
        if isinstance(options, str):
            return cls.from_options(options, None)
        return cls.from_options(None, options)

    def _check_name(self) -> None:
        if not isinstance(self.name, str) or self.name not in POLICIES:
            close = get_close_matches(str(self.name), POLICIES, n=1)
            raise ConfigError(
                f"policy {self.name!r}",
                f"the policies are {', '.join(POLICIES)}",
                "there is no policy of that name",
                f"did you mean {close[0]!r}?" if close else "choose one of them",
            )

    def _check_budget(self, field: str, budget: object) -> None:
        good = _is_number(budget) and (0 < budget <= 1 or (isinstance(budget, int) and budget > 0))
        if not good and budget != "full":
            raise ConfigError(
                f"{field}={budget!r}",
                "a budget is an int > 0 (slots), a float in (0, 1] (a share), or 'full'",
                "no number of slots follows from it",
                "give e.g. 512 or 0.2",
            )

    def _check_cap(self, slots: int, whole: int, max_model_len: int) -> None:
        if self.max_budget is None:
            return
        most = self._slots(self.max_budget, whole, max_model_len)
        if slots > most:
            raise ConfigError(
                f"budget={self.budget!r}",
                f"that is {slots} slots, and max_budget={self.max_budget!r} is {most}",
                "this server gives a request no more",
                f"ask for at most {self.max_budget!r}",
            )

    def _check_count(self, field: str) -> None:
        value = getattr(self, field)
        if field == "num_sink_tokens" and value is None:
            return
        bits = 63 if field == "seed" else 31
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**bits:
            raise ConfigError(
                f"{field}={value!r}",
                f"{field} is a whole number of at most {bits} bits",
                "it counts things, or seeds them",
                f"give an int in [0, 2**{bits})",
            )

    def _check_choice(self, field: str, works: tuple[str, ...]) -> None:
        value = getattr(self, field)
        if value in works or (field == "score" and value is None):
            return
        raise ConfigError(
            f"{field}={value!r}",
            f"what works is {', '.join(works)}",
            "there is no such choice",
            f"use {field}={works[0]!r}",
        )

    def _check_unread(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if (
                field.name in {"name", "budget", "kernels", *self.policy.options}
                or value == field.default
            ):
                continue
            raise ConfigError(
                f"{field.name}={value!r} with policy {self.name!r}",
                f"{self.name!r} reads {', '.join(sorted(self.policy.options)) or 'no options'}",
                "an option that nothing reads would be a silent no-op",
                f"leave {field.name} out, or choose another policy",
            )

    def _check_together(self) -> None:
        window, seen = self.prefill == "window", self.policy.score is ScoreKind.SUM
        paged = self.granularity == "block"
        share, basis = (
            not isinstance(self.budget, int),
            self.budget_basis != type(self).budget_basis,
        )
        no_op, not_built = "it would be a silent no-op", "the two are not built together"
        asked_basis = f"budget_basis={self.budget_basis!r}"
        slots = f"budget={self.budget!r} is a number of slots, a share of nothing"
        unranked = f"{self.name!r} does not rank tokens by attention"
        asked_window = f"observation_window={self.observation_window!r}"
        all_score = f"prefill={self.prefill!r} lets every query of a prompt score"
        other_window = self.observation_window != type(self).observation_window
        by_age, means = self.score_by_age, f"with score={self._own_score!r}"
        all_count = "a mean counts every query of the prompt, and the last alone score"
        by_token = "means are ranked token by token"
        for refused, asked, found, why in (
            (basis and not share, asked_basis, slots, no_op),
            (window and not seen, f"prefill='window' with policy {self.name!r}", unranked, no_op),
            (other_window and not window, asked_window, all_score, no_op),
            (window and not self.observation_window, asked_window, "no query scores", no_op),
            (window and by_age, f"prefill='window' {means}", all_count, not_built),
            (paged and by_age, f"granularity='block' {means}", by_token, not_built),
            (
                paged and basis,
                f"granularity='block' with {asked_basis}",
                "the pages of a short request may all be recent",
                not_built,
            ),
        ):
            if refused:
                raise ConfigError(asked, found, why, "leave it out, or change the other option")

    def _check_size(self) -> None:
        if not self.policy.evicts:
            if isinstance(self.budget, int) or self.budget not in (1.0, "full", type(self).budget):
                raise ConfigError(
                    f"budget={self.budget!r} with policy {self.name!r}",
                    f"{self.name!r} keeps every token",
                    "a budget would be ignored",
                    "leave the budget out, or choose another policy",
                )
        elif isinstance(self.budget, int):
            slots = max(self.budget, self.min_budget)
            self._check_slots(slots, "that many slots", self.num_sinks)

    def _check_pages(self, budget: Budget, block_size: int, max_model_len: int) -> None:
        # Recent tokens lie in pages of the prompt and in refilled ones, both cut at either end.
        safe = -(-budget.num_sinks // block_size) - (-budget.num_recent // block_size) + 2
        if budget.capacity // block_size <= safe and budget.capacity < max_model_len:
            raise ConfigError(
                f"granularity='block' with budget={self.budget!r}",
                f"that is {budget.capacity // block_size} pages of {block_size}, of which recent "
                f"tokens and sinks may touch {safe}",
                "no page might be left to evict",
                "give a larger budget, smaller pages (--block-size) or a smaller recent_ratio",
            )

    def _check_slots(self, slots: int, meaning: str, num_sinks: int) -> None:
        least = minimum_slots(self.effective_recent_ratio, num_sinks)
        if slots < least:
            raise ConfigError(
                f"budget={self.budget!r}",
                meaning,
                f"{num_sinks} first tokens, the recent window and the next token need {least}",
                f"give a budget of at least {least}, or fewer sinks",
            )


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)
