# SPDX-License-Identifier: Apache-2.0
"""The options of a policy, and what follows from them alone."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from vllm_h2o.errors import ConfigError
from vllm_h2o.options.option import PLACES, Reader, check_value, option
from vllm_h2o.policy import Eviction, Policy, Ranking, Rule, Split, policies
from vllm_h2o.policy.eviction import At

_UNREAD: dict[Reader, str] = {
    "evicts": "keeps every token",
    "ranks": "does not rank tokens",
    "window": "has no term of the prompt's last queries",
}
"""Reader of an option -> a policy that does not read it, in words."""


@dataclass(frozen=True)
class Options:
    """The options that a user may set.

    Raises:
        ConfigError: for a value that its option does not take, or that the policy does not read.

    """

    name: str = option(
        "h2o",
        "Policy that decides which tokens stay in the cache",
        words=lambda: policies(),
        read_by="every",
        shown="none",
    )
    budget: int | float | str = option(
        0.2,
        "Tokens each sequence keeps: a token count, a fraction of budget_basis, or full; rounded "
        "up to whole pages",
        words=("full",),
        least=1,
        fraction="(0, 1]",
    )
    budget_basis: str = option(
        "max_model_len",
        "Tokens that a fraction refers to: max_model_len, the prompt, or the prompt plus "
        "max_tokens (request)",
        words=("max_model_len", "prompt", "request"),
    )
    min_budget: int = option(0, "Smallest budget, in tokens, that a fraction can give", least=0)
    max_budget: int | float | str | None = option(
        None,
        "Largest budget that a request may ask for as kv_budget: tokens, a fraction, or full",
        words=("full",),
        least=1,
        fraction="(0, 1]",
        shown="no limit",
    )
    recent_ratio: float | None = option(
        None,
        "Fraction of the budget, beyond the sinks, that goes to the most recent tokens",
        fraction="[0, 1]",
        read_by="ranks",
        shown="0.5; 0.1 with score=reconstruction",
    )
    num_sink_tokens: int | None = option(
        None,
        "Number of first tokens that are never evicted",
        least=0,
        shown="0; streaming 4",
    )
    eviction: At = option(
        "prompt_end",
        "When a request is first evicted from: at its prompt_end, after each prompt chunk, or "
        "under memory pressure",
        words=("prompt_end", "chunk", "pressure"),
    )
    evict_every: int | str = option(
        1,
        "Evict N tokens at a time during decode, exceeding the budget by up to N-1; page: one "
        "whole page",
        words=("page",),
        least=1,
    )
    observation_window: int = option(
        64,
        "Number of last prompt queries that score tokens in h2o2 and snapkv",
        least=2,
        read_by="window",
    )
    score: str | None = option(
        None,
        "Ranking of h2o (sum, sum_squares, mean, mean_squares) or of h2o2 (combined, "
        "reconstruction, window)",
        words=lambda: {score: None for policy in policies().values() for score in policy.rules},
        read_by="ranks",
        shown="sum; h2o2 combined; h2o2 window with prefix caching",
    )
    split: Split | None = option(
        None,
        "KV heads that share slots by their best tokens: none, heads of one layer, or heads of "
        "all layers",
        words=("none", "heads", "layers"),
        read_by="ranks",
        shown="none; layers with score=reconstruction",
    )
    merge: float | None = option(
        None,
        "Cosine above which an evicted token is merged into the most similar key; 0 merges none",
        fraction="[0, 1)",
        shown="0; h2o2 0.8",
    )
    positions: int | str = option(
        "original",
        "Positions of tokens: original, or rolling: renumbered before they reach the trained "
        "length, or this number",
        words=("original", "rolling"),
        least=1,
    )
    continuation: int | str = option(
        False,
        "Whether a next turn starts from its last one's cache; N: N GiB of memory keep more; "
        "/PATH:N: files",
        least=1,
        path=True,
    )
    kernels: str = option(
        "auto",
        "Kernels: native (C++) or torch on a CPU, xformers for prompts on a GPU; auto: the fastest",
        words=("auto", "native", "torch", "xformers"),
        read_by="every",
    )

    def __post_init__(self) -> None:
        for field in fields(self):
            check_value(field, getattr(self, field.name))
        self._check_read()
        if self.score is not None and self.score not in self.policy.rules:
            raise self._without_score(self.score)

    @property
    def policy(self) -> Policy:
        """The policy by its name."""
        return policies()[self.name]

    @property
    def rule(self) -> Rule:
        """The policy's rule, or the one that its score names."""
        return self.policy if self.score is None else self.policy.rules[self.score]

    @property
    def ranking(self) -> Ranking:
        """The terms that rank tokens."""
        return self.rule.ranking

    @property
    def ranking_name(self) -> str:
        """The ranking as the user chose it: by a score, or by the policy's name."""
        return f"policy {self.name}" if self.score is None else f"score={self.score}"

    @property
    def schedule(self) -> Eviction:
        """When tokens are evicted, and how many at a time."""
        if isinstance(self.evict_every, str):
            return Eviction(self.eviction, unit="page")
        return Eviction(self.eviction, self.evict_every)

    @property
    def num_sinks(self) -> int:
        """Number of first tokens that are never evicted."""
        own = self.num_sink_tokens
        return self.policy.num_sink_tokens if own is None else own

    @property
    def effective_recent_ratio(self) -> float:
        """Fraction of the budget, beyond the sinks, that is the recent window."""
        own = self.rule.recent_ratio if self.recent_ratio is None else self.recent_ratio
        return own if self.policy.keeps_heavy else 1.0

    @property
    def rolls(self) -> bool:
        """Whether positions are renumbered among resident tokens."""
        return self.positions != "original"

    @property
    def position_limit(self) -> int | None:
        """One past the last position, where positions roll and the limit is known."""
        return self.positions if isinstance(self.positions, int) else None

    @property
    def continues(self) -> bool:
        """Whether requests continue from caches of earlier ones."""
        return bool(self.continuation)

    @property
    def continuation_folder(self) -> Path | None:
        """Folder for the caches of prompts that requests ask to keep; None: there is none."""
        path = self._places[1]
        return Path(path).expanduser().absolute() if path else None

    @property
    def continuation_host_bytes(self) -> int:
        """Host memory of each worker for caches of earlier turns, in bytes."""
        return int(self._places[0] or 0) << 30

    @property
    def continuation_folder_bytes(self) -> int:
        """Most bytes of the folder's files, which keep what memory drops, too; 0: it keeps none."""
        return int(self._places[2] or 0) << 30

    @property
    def _places(self) -> tuple[str | None, ...]:
        """GiB of host memory, the folder, and GiB of its files, as ``continuation`` names them."""
        if isinstance(self.continuation, bool):
            return None, None, None
        if isinstance(self.continuation, int):
            return str(self.continuation), None, None
        found = PLACES.fullmatch(self.continuation)
        return found.groups() if found else (None, None, None)

    @property
    def keeps_scores(self) -> bool:
        """Whether the last term expires, so that slots keep their scores without it."""
        return self.ranking.lifetime > 0

    @property
    def num_window_queries(self) -> int:
        """Last queries of a prompt that are computed in one chunk; 0 without a window term."""
        return self.observation_window if self.ranking.term("window") else 0

    def _check_read(self) -> None:
        """Refuse an option that the policy does not read.

        Raises:
            ConfigError: for a value other than the default of such an option.

        """
        reads = {
            "every": True,
            "evicts": self.policy.evicts,
            "ranks": self.policy.keeps_heavy,
            "window": any(
                rule.ranking.term("window") for rule in (self.policy, *self.policy.scores.values())
            ),
        }
        for field in fields(self):
            value, reader = getattr(self, field.name), field.metadata["read_by"]
            if reads[reader] or value == field.default:
                continue
            if not self.policy.evicts:
                whole = value == "full" or (isinstance(value, float) and value == 1)
                if field.name == "budget" and whole:
                    continue
                reader = "evicts"
            raise ConfigError(
                f"{field.name}={value!r} with policy {self.name}",
                f"{self.name} {_UNREAD[reader]}",
                "the option would have no effect",
                f"leave {field.name} out, or choose another policy",
            )

    def _without_score(self, score: str) -> ConfigError:
        known = ", ".join(self.policy.rules)
        other = next(p.name for p in policies().values() if score in p.rules)
        return ConfigError(
            f"score={score} with policy {self.name}",
            f"{self.name} takes {known}" if known else f"{self.name} has one ranking",
            f"score={score} is a ranking of {other}",
            f"use --kv-policy {other}, or leave score out",
        )
