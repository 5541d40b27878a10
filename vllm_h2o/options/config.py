"""The policy's configuration: frozen, validated, and read from ``additional_config`` here alone."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from vllm_h2o.errors import IntegrityError
from vllm_h2o.options.checks import (
    check_cap,
    check_fields,
    check_lengths,
    check_pages,
    check_size,
    check_slots,
)
from vllm_h2o.options.conflicts import can_split, check_together, check_unread
from vllm_h2o.options.option import option
from vllm_h2o.options.parsing import ADDITIONAL_CONFIG_KEY, carried_options, named_options
from vllm_h2o.policy import POLICIES, SCORES, Budget, Policy, Score, ScoreKind, split_budget
from vllm_h2o.policy.budget import minimum_slots

_SCORE_MEANINGS = ", ".join(f"{name} ({score.meaning})" for name, score in SCORES.items())


@dataclass(frozen=True)
class KVPolicyConfig:
    """What a user may set. ``--help`` and docs/options.md are written from these descriptions.

    Raises:
        ConfigError: for any value that cannot be used.

    """

    name: str = option("h2o", f"the policy: {', '.join(POLICIES)}", shown="none")
    budget: int | float | str = option(
        0.2,
        "tokens a sequence may hold: an int is that many; a float in (0, 1] is that fraction of "
        "budget_basis; full is every token; rounded up to whole pages",
    )
    budget_basis: str = option(
        "max_model_len",
        "what a fraction is of: max_model_len, a request's prompt, or the request, which is its "
        "prompt and its max_tokens",
        choices=("max_model_len", "prompt", "request"),
    )
    min_budget: int = option(0, "fewest tokens, whatever the fraction comes to", bits=31)
    max_budget: int | float | str | None = option(
        None, "most that a request may ask for as kv_budget, given like budget", shown="no limit"
    )
    recent_ratio: float | None = option(
        None,
        "fraction of the budget that is the recent window; the rest are heavy hitters",
        shown="0.5; h2o2 0.3",
        fraction="of the budget",
    )
    num_sink_tokens: int | None = option(
        None, "first tokens of a sequence that are never evicted", bits=31, shown="0; streaming 4"
    )
    protect_prompt_tokens: int = option(
        0, "first tokens of a prompt that are never evicted; all of a shorter prompt", bits=31
    )
    granularity: str = option(
        "token",
        "what is evicted at a time: a token, or a block: the tokens of a page, by the sum of their "
        "scores",
        choices=("token", "block"),
    )
    prefill: str = option(
        "full",
        "when a prompt is evicted from: full, once, at its end; window, likewise, scored by its "
        "last observation_window queries alone; chunked, after each chunk, so that a prompt may be "
        "longer than the pool",
        choices=("full", "window", "chunked"),
    )
    eviction: str = option(
        "always",
        "when a sequence is cut to its budget: always, at its prompt's end, whether memory is "
        "short or not; pressure, once the pool runs short, and only those that it takes: until "
        "then a sequence keeps every token",
        choices=("always", "pressure"),
    )
    pressure_watermark: float = option(
        0.02,
        "with eviction=pressure: fraction of the pool's pages that is free again, beyond what is "
        "needed, when sequences have been cut",
        fraction="of the pool",
    )
    evict_every: int = option(
        1,
        "past the prompt, tokens that are evicted at a time: a sequence grows by so many, less "
        "one, past its budget, and falls back to it",
        bits=31,
    )
    observation_window: int = option(
        64,
        "how many of the prompt's last queries score with prefill=window, and once more with "
        "score=combined and reconstruction",
        bits=31,
    )
    window_score: str = option(
        "max",
        "with prefill=window: a token's score: max, the most that any of those queries and heads "
        "gives to it or to one of the twelve tokens before it; sum, all that they give to it",
        choices=("max", "sum"),
    )
    positions: str = option(
        "original",
        "positions of tokens: original, their indices; rolling, counted anew from 0 among what is "
        "resident whenever the next would reach position_limit, so that a text may be longer than "
        "what the model was trained on; with prefill=chunked",
        choices=("original", "rolling"),
    )
    position_limit: int | None = option(
        None,
        "with positions=rolling: positions that tokens may have",
        bits=31,
        shown="the model's own longest sequence",
    )
    score: str | None = option(
        None,
        f"what ranks tokens: {_SCORE_MEANINGS}",
        choices=tuple(SCORES),
        shown="sum; h2o2 combined",
    )
    score_skip_recent: int = option(
        0,
        "a query scores tokens that are at least so many positions older; not in a scoring pass",
        bits=31,
    )
    continuation: bool = option(
        False,
        "whether the next turn of a conversation begins from what the last one held when it ended",
    )
    split: bool | None = option(
        None,
        "whether a layer's KV heads share its slots, in whole pages: who has more of its best "
        "tokens when a prompt is evicted from gets more; or each has the same number",
        shown="false; h2o2 true, where it can",
    )
    split_layers: bool | None = option(
        None,
        "with split: whether the KV heads of all layers share slots, not those of each layer",
        shown="false; score=reconstruction: as split",
    )
    merge: float = option(
        0.0,
        "cosine of two keys of a KV head above which a token that a new one overwrites is merged "
        "into the nearest token that stays; 0: what is evicted is dropped",
        fraction="of 1, the cosine of equal keys,",
    )
    window_lifetime: int = option(
        128,
        "with score=combined or reconstruction: tokens after the prompt for which what its window "
        "gave counts; then its tokens go back to the scores that they had without; 0: for good",
        bits=31,
    )
    seed: int = option(0, "of the random policy, for requests that bring no seed", bits=63)
    kernels: str = option(
        "auto",
        "on a CPU: native (C++) or torch; on a GPU: xformers, which attends prompts there; auto "
        "takes the fastest that are there",
        choices=("auto", "native", "torch", "xformers"),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        check_unread(self)
        check_together(self)
        check_size(self)

    @property
    def policy(self) -> Policy:
        """The policy by its name."""
        return POLICIES[self.name]

    @property
    def num_sinks(self) -> int:
        """First tokens that are never evicted, of a prompt that is long enough."""
        return max(self._own_sinks, self.protect_prompt_tokens)

    @property
    def score_name(self) -> str:
        """The score by its name, the policy's own where the user names none."""
        return self.policy.default_score if self.score is None else self.score

    @property
    def ranking(self) -> Score:
        """How attention accumulates and ranks, where it does."""
        return SCORES[self.score_name]

    @property
    def score_power(self) -> int:
        """Of the probabilities that are added to scores; 0 where attention adds nothing."""
        return self.ranking.power if self._uses_attention else 0

    @property
    def scores_by_maximum(self) -> bool:
        """Whether an observation window scores by maximum, and not by sum."""
        return self.prefill == "window" and self.window_score == "max"

    @property
    def splits(self) -> bool:
        """Whether the KV heads of a layer hold unequal numbers of tokens."""
        return (self.policy.splits and can_split(self)) if self.split is None else self.split

    @property
    def splits_layers(self) -> bool:
        """Whether layers do, too: all KV heads share slots, not those of each layer."""
        by_default = self.splits and self.ranking.reads_again
        return by_default if self.split_layers is None else self.split_layers

    @property
    def rolls(self) -> bool:
        """Whether positions are counted anew among what is resident."""
        return self.positions == "rolling"

    @property
    def merges(self) -> bool:
        """Whether victims are merged, and slots have masses."""
        return self.merge > 0

    @property
    def keeps_scores(self) -> bool:
        """Whether what the observation window gave is taken back, and slots keep scores for it."""
        return self._uses_attention and self.ranking.window and self.window_lifetime > 0

    @property
    def extra_words(self) -> int:
        """Words of a slot next to score and position."""
        return self.merges + self.keeps_scores

    @property
    def _uses_attention(self) -> bool:
        return self.policy.score is ScoreKind.ATTENTION

    @property
    def num_window_queries(self) -> int:
        """Last queries of a prompt that score together, in one chunk; 0: none do."""
        scores = self.prefill == "window" or self.ranking.window
        return self.observation_window if scores else 0

    @property
    def supports_prefix_caching(self) -> bool:
        """Whether what survives of a prompt follows from what each request computes itself.

        A prefix that is found in the cache is not computed again: its queries cannot score.
        """
        scored_late = self.prefill == "window" and self.observation_window > 1
        return scored_late or (not self._uses_attention and self.prefill == "full")

    @property
    def effective_recent_ratio(self) -> float:
        """Fraction of the budget, beyond the sinks, that is the recent window."""
        policy = self.policy
        own = policy.default_recent_ratio if self.recent_ratio is None else self.recent_ratio
        return own if policy.keeps_heavy else 1.0

    def resolve(self, max_model_len: int, block_size: int) -> Budget:
        """The budget in slots: of the longest sequence, where it depends on the request.

        Args:
            max_model_len: longest sequence, in tokens.
            block_size: slots of a page.

        Raises:
            ConfigError: when a fraction comes to fewer slots than sinks + recent + 1, or to more
                than max_budget, and for lengths that no sequence has.

        """
        check_lengths(self, max_model_len)
        slots = self._slots(self.budget, max_model_len, max_model_len)
        self._check_cap(slots, max_model_len, max_model_len)
        meaning = f"that is {slots} slots of max_model_len={max_model_len}"
        check_slots(self, slots, meaning, self.num_sinks)
        budget = self._split(slots, block_size, self.num_sinks, max_model_len)
        if self.granularity == "block":
            check_pages(self, budget, block_size, max_model_len)
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

        A fraction of this configuration that comes to less than sinks, a recent token and the next
        one is lifted to that.

        Args:
            max_model_len: longest sequence, in tokens.
            block_size: slots of a page.
            prompt_len: tokens of the prompt.
            max_tokens: most tokens that follow.
            asked: the request's own budget; a fraction is one of ``budget_basis``.

        Raises:
            ConfigError: when the budget that is asked for cannot be used.

        """
        num_sinks = max(self._own_sinks, min(self.protect_prompt_tokens, prompt_len))
        if asked is None and self.budget_basis == "max_model_len" and num_sinks == self.num_sinks:
            return None
        own = self if asked is None else self._with(asked)
        whole = {"prompt": prompt_len, "request": min(prompt_len + max_tokens, max_model_len)}
        basis = whole.get(self.budget_basis, max_model_len)
        slots = self._slots(own.budget, basis, max_model_len)
        if asked is None:
            slots = max(slots, minimum_slots(self.effective_recent_ratio, num_sinks))
        else:
            check_slots(own, slots, f"that is {slots} slots", num_sinks)
            own._check_cap(slots, basis, max_model_len)
        budget = self._split(slots, block_size, num_sinks, max_model_len)
        if self.granularity == "block" and asked is not None:
            check_pages(own, budget, block_size, max_model_len)
        return budget

    def _split(self, slots: int, block_size: int, num_sinks: int, max_model_len: int) -> Budget:
        ratio = self.effective_recent_ratio
        return split_budget(slots, block_size, ratio, num_sinks, self.evict_every, max_model_len)

    def _with(self, asked: int | float | str) -> KVPolicyConfig:
        """This with the budget of a request, checked like its own."""
        basis = self.budget_basis if isinstance(asked, float) else type(self).budget_basis
        return replace(self, budget=asked, budget_basis=basis)

    def _slots(self, budget: int | float | str, whole: int, max_model_len: int) -> int:
        """What a budget comes to, as a fraction of ``whole`` or as it stands."""
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

    @classmethod
    def of(cls, vllm_config: Any) -> KVPolicyConfig | None:
        """The policy of vLLM's config; None when there is none. Parsed once in a process."""
        carried = vllm_config.additional_config
        try:
            return _parsed(json.dumps(carried_options(carried)))
        except TypeError:  # not what this package carries: read as a user's
            return cls.from_additional_config(carried)

    @classmethod
    def required(cls, vllm_config: Any) -> KVPolicyConfig:
        """The policy of vLLM's config, where a part of this package runs that needs one.

        Raises:
            IntegrityError: when there is none.

        """
        config = cls.of(vllm_config)
        if config is None:
            raise IntegrityError("a part of the policy's engine runs without a kv_policy")
        return config

    def _check_cap(self, slots: int, whole: int, max_model_len: int) -> None:
        if self.max_budget is not None:
            check_cap(self, slots, self._slots(self.max_budget, whole, max_model_len))


@lru_cache
def _parsed(text: str) -> KVPolicyConfig | None:
    """A configuration from the JSON of what ``additional_config`` carries of it."""
    return KVPolicyConfig.from_additional_config({ADDITIONAL_CONFIG_KEY: json.loads(text)})
