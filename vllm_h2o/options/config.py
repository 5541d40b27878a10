# SPDX-License-Identifier: Apache-2.0
"""The policy's configuration: frozen, checked, and read from ``additional_config`` here alone."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

from vllm_h2o.errors import ConfigError, IntegrityError
from vllm_h2o.options.capabilities import Setup, find_conflict, obstacle
from vllm_h2o.options.checks import check_cap, check_length, check_slots, counted
from vllm_h2o.options.options import Options
from vllm_h2o.options.parsing import ADDITIONAL_CONFIG_KEY, carried_options, named_options
from vllm_h2o.options.remedies import Given
from vllm_h2o.policy import Budget, Split, split_budget
from vllm_h2o.policy.budget import ALL_RECENT, minimum_slots


@dataclass(frozen=True)
class KVPolicyConfig(Options):
    """The options of a policy, whose parts go together.

    Raises:
        ConfigError: for options that cannot be used.

    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if conflict := find_conflict(self.setup()):
            raise ConfigError(*conflict)
        if self.policy.evicts and isinstance(self.budget, int):
            slots = max(self.budget, self.min_budget)
            check_slots(self, slots, f"it is {counted(slots)}")

    def setup(self, vllm_config: Any = None, given: Given = frozenset()) -> Setup:
        """Return what the parts of :mod:`~vllm_h2o.options.capabilities` look at."""
        return Setup(self, self.shared_slots, self.merge_above, vllm_config, given)

    @cached_property
    def split_reason(self) -> str | None:
        """The option that turns the rule's default ``split`` off; None: none does."""
        if self.split is not None:
            return None
        return obstacle(Setup(self), Setup(self, split=self.rule.split))

    @cached_property
    def shared_slots(self) -> Split:
        """KV heads that share slots, as asked for, or by default where the options allow it."""
        if self.split is not None:
            return self.split
        return "none" if self.split_reason else self.rule.split

    def merge_reason(self, vllm_config: Any = None) -> str | None:
        """Return what rules out the rule's default ``merge``; None: nothing does.

        Args:
            vllm_config: of the engine; None: the options alone count.

        """
        without = Setup(self, engine=vllm_config)
        return obstacle(without, replace(without, merge=self.rule.merge))

    @cached_property
    def merge_above(self) -> float:
        """``merge``, as asked for, or by default where the options allow it; 0: none is merged."""
        if self.merge is not None:
            return self.merge
        return 0.0 if self.merge_reason() else self.rule.merge

    @property
    def merges(self) -> bool:
        """Whether evicted tokens are merged into others, so that slots have masses."""
        return self.merge_above > 0

    @property
    def extra_words(self) -> int:
        """Words of a slot next to score and position."""
        return self.merges + self.keeps_scores

    def within(self, vllm_config: Any) -> KVPolicyConfig:
        """Return this with other defaults where the engine rules one out.

        Args:
            vllm_config: of the engine.

        """
        own, fallback = self, self.policy.fallback
        if self.score is None and fallback is not None:
            other = replace(self, score=fallback)
            if obstacle(Setup(other, engine=vllm_config), Setup(self, engine=vllm_config)):
                own = other
        off = own.merge is None and own.merges and own.merge_reason(vllm_config)
        return replace(own, merge=0.0) if off else own

    @property
    def splits(self) -> bool:
        """Whether KV heads hold unequal numbers of tokens."""
        return self.shared_slots != "none"

    @property
    def splits_layers(self) -> bool:
        """Whether the KV heads of all layers share slots."""
        return self.shared_slots == "layers"

    def resolve(
        self, max_model_len: int, block_size: int, budget: int | float | str | None = None
    ) -> Budget:
        """Count the budget in slots: of the longest sequence, where it depends on the request.

        It checks nothing (:meth:`check` does): vLLM asks about lengths that nobody wants. What is
        too little for any sequence is lifted to the fewest slots.

        Args:
            max_model_len: longest sequence, in tokens.
            block_size: slots of a page.
            budget: another budget; None: this configuration's.

        """
        asked = self.budget if budget is None else budget
        slots = self._slots(asked, max_model_len, max_model_len)
        return self._divided(max(slots, self._least(block_size)), block_size, max_model_len)

    def check(self, max_model_len: int, block_size: int) -> None:
        """Refuse a budget that the longest sequence cannot use, once both sizes are final.

        Args:
            max_model_len: longest sequence, in tokens.
            block_size: slots of a page.

        Raises:
            ConfigError: when a fraction comes to fewer slots than sinks, a recent token and the
                next one, or to more than max_budget, and for a min_budget that no sequence has.

        """
        check_length(self, max_model_len)
        slots = self._slots(self.budget, max_model_len, max_model_len)
        meaning = f"it is {counted(slots)} of max_model_len={max_model_len}"
        self._check_cap(slots, meaning, max_model_len, max_model_len)
        if self.policy.evicts:
            check_slots(self, slots, meaning, block_size, max_model_len)

    def resolve_request(
        self,
        max_model_len: int,
        block_size: int,
        prompt_len: int,
        max_tokens: int,
        asked: int | float | str | None = None,
    ) -> Budget | None:
        """Return the budget of one request; None where it is that of every request.

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
        if asked is None and self.budget_basis == "max_model_len":
            return None
        own = self if asked is None else self._with(asked)
        whole = {"prompt": prompt_len, "request": min(prompt_len + max_tokens, max_model_len)}
        basis = whole.get(self.budget_basis, max_model_len)
        slots = self._slots(own.budget, basis, max_model_len)
        if asked is None:
            slots = max(slots, self._least(block_size))
        else:
            check_slots(own, slots, f"it is {counted(slots)}", block_size)
            own._check_cap(slots, f"it is {counted(slots)}", basis, max_model_len)
        return self._divided(slots, block_size, max_model_len)

    def _least(self, block_size: int) -> int:
        ratio = self.effective_recent_ratio
        return minimum_slots(ratio, self.num_sinks, self.schedule, block_size)

    def _divided(self, slots: int, block_size: int, max_model_len: int) -> Budget:
        ratio = self.effective_recent_ratio
        first = ALL_RECENT if self.splits else self.rule.first_recent
        how = (block_size, ratio, self.num_sinks, self.schedule, max_model_len, first)
        return split_budget(slots, *how)

    def _with(self, asked: int | float | str) -> KVPolicyConfig:
        """Return this with the budget of a request, checked like its own."""
        basis = self.budget_basis if isinstance(asked, float) else type(self).budget_basis
        return replace(self, budget=asked, budget_basis=basis)

    def _slots(self, budget: int | float | str, whole: int, max_model_len: int) -> int:
        """Return the slots of a budget, as a fraction of ``whole`` or as it stands."""
        if not self.policy.evicts or isinstance(budget, str):
            return max_model_len
        # As it is written: in floating point, 0.07 of 1600 is a hair, and so a page, above 112.
        written = Fraction(str(budget))
        slots = math.ceil(written * whole if isinstance(budget, float) else written)
        return min(max(slots, self.min_budget), max_model_len)

    def _check_cap(self, slots: int, meaning: str, whole: int, max_model_len: int) -> None:
        if self.max_budget is not None:
            check_cap(self, slots, meaning, self._slots(self.max_budget, whole, max_model_len))

    def to_dict(self) -> dict[str, Any]:
        """Return the plain form that ``additional_config`` carries."""
        return asdict(self)

    @cached_property
    def of_caches(self) -> dict[str, Any]:
        """The options on which caches depend, as JSON has them: all but where caches are kept."""
        options = {k: v for k, v in self.to_dict().items() if k != "continuation"}
        plain: dict[str, Any] = json.loads(json.dumps(options, default=str))
        return plain

    @classmethod
    def from_options(cls, name: str | None, options: object) -> KVPolicyConfig:
        """Read ``--kv-policy NAME`` and ``--kv-policy-config '{...}'``, either of them optional."""
        return cls(**named_options(name, options, [f.name for f in fields(cls)]))

    @classmethod
    def from_additional_config(cls, additional_config: object) -> KVPolicyConfig | None:
        """Read vLLM's ``additional_config``; None when it asks for no policy."""
        options = carried_options(additional_config)
        if options is None:
            return None
        if isinstance(options, str):
            return cls.from_options(options, None)
        return cls.from_options(None, options)

    @classmethod
    def of(cls, vllm_config: Any) -> KVPolicyConfig | None:
        """Return the policy of vLLM's config; None when there is none. Parsed once a process."""
        carried = vllm_config.additional_config
        try:
            return _parsed(json.dumps(carried_options(carried)))
        except TypeError:  # not what this package carries: read as a user's
            return cls.from_additional_config(carried)

    @classmethod
    def required(cls, vllm_config: Any) -> KVPolicyConfig:
        """Return the policy of vLLM's config, where only a policy's engine can be.

        Raises:
            IntegrityError: when there is none.

        """
        config = cls.of(vllm_config)
        if config is None:
            raise IntegrityError("a part of the policy's engine runs without a kv_policy")
        return config


@lru_cache
def _parsed(text: str) -> KVPolicyConfig | None:
    """Return the configuration of the JSON that ``additional_config`` carries."""
    return KVPolicyConfig.from_additional_config({ADDITIONAL_CONFIG_KEY: json.loads(text)})
