"""What tells one eviction policy from another."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ScoreKind(str, Enum):
    """Where the score that ranks tokens comes from."""

    ATTENTION = "attention"
    """Accumulated attention, float32; how is one of :data:`~vllm_h2o.policy.scores.SCORES`."""
    RANDOM = "random"
    """A pseudo-random number per (seed, layer, KV head, position), drawn when a token is stored."""
    NONE = "none"
    """No score: position alone decides."""


BUDGET_OPTIONS = frozenset(
    {
        "budget",
        "budget_basis",
        "min_budget",
        "max_budget",
        "num_sink_tokens",
        "protect_prompt_tokens",
        "prefill",
        "eviction",
        "pressure_watermark",
        "merge",
        "evict_every",
        "positions",
        "position_limit",
        "continuation",
    }
)
"""What every policy reads that evicts."""


@dataclass(frozen=True)
class Policy:
    """One eviction policy.

    Args:
        name: the value of ``--kv-policy``.
        summary: one line for ``--help``.
        score: what ranks the tokens that are neither sinks nor recent.
        keeps_heavy: whether a part of the budget goes to the best-scored tokens;
            otherwise everything but the sinks is the recent window.
        default_num_sink_tokens: sinks when the user names none.
        default_recent_ratio: fraction of the budget that is recent when the user names none.
        splits: whether KV heads share a layer's slots when the user does not say.
        default_score: how attention accumulates and ranks when the user does not say.
        evicts: False for the policy that keeps every token.
        options: fields of the configuration that it reads; any other would be a silent no-op.

    """

    name: str
    summary: str
    score: ScoreKind
    keeps_heavy: bool
    default_num_sink_tokens: int = 0
    default_recent_ratio: float = 0.5
    splits: bool = False
    default_score: str = "sum"
    evicts: bool = True
    options: frozenset[str] = BUDGET_OPTIONS
