"""Options that do not go together, and options that nothing would read: one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from vllm_h2o.errors import ConfigError
from vllm_h2o.policy import ScoreKind


@dataclass(frozen=True)
class Conflict:
    """Two options that do not go together.

    Args:
        applies: whether a configuration has both.
        asked: the one, formatted with the configuration as ``c``.
        found: the other, formatted likewise.
        why: the reason.

    """

    applies: Callable[[Any], bool]
    asked: str
    found: str
    why: str


NO_OP = "it would be a silent no-op"
NOT_BUILT = "the two are not built together"


def _has_basis(config: Any) -> bool:
    return config.budget_basis != type(config).budget_basis


def _has_pressure(config: Any) -> bool:
    return config.eviction == "pressure"


def _has_window(config: Any) -> bool:
    return config.prefill == "window"


def _asks_window(config: Any) -> bool:
    return _has_window(config) or config.ranking.window


def _evicts_together(config: Any) -> bool:
    return config.evict_every > 1


UNSPLIT: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda c: c.granularity == "block", "granularity={c.granularity!r}"),
    (_has_pressure, "eviction={c.eviction!r}"),
    (_evicts_together, "evict_every={c.evict_every!r} packs again and again"),
    (lambda c: c.prefill == "chunked", "prefill={c.prefill!r} evicts before the prompt is known"),
    (lambda c: c.continuation, "continuation=true attends to what is held from a prompt"),
)
"""What heads that share slots do not go with: their pages stay their own from the prompt's end."""


def can_split(config: Any) -> bool:
    """Whether KV heads may share slots."""
    return not any(applies(config) for applies, _ in UNSPLIT)


def _with_split(applies: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda config: bool(config.split) and applies(config)


CONFLICTS = (
    *(Conflict(_with_split(applies), "split=true", found, NOT_BUILT) for applies, found in UNSPLIT),
    Conflict(
        lambda c: bool(c.split_layers) and not c.splits,
        "split_layers=true",
        "split={c.splits!r}: each KV head has as many slots as any other",
        NO_OP,
    ),
    Conflict(
        lambda c: c.policy.default_score == "combined" and not c.ranking.window,
        "score={c.score_name!r} with policy {c.name!r}",
        "{c.name!r} keeps what the prompt's last queries look at, and this score does not",
        "it would be policy 'h2o' under another name",
    ),
    Conflict(lambda c: c.merge == 1, "merge={c.merge!r}", "no cosine is above 1", NO_OP),
    Conflict(
        lambda c: _has_basis(c) and isinstance(c.budget, int),
        "budget_basis={c.budget_basis!r}",
        "budget={c.budget!r} is a number of slots, a fraction of nothing",
        NO_OP,
    ),
    Conflict(
        lambda c: _has_window(c) and c.policy.score is not ScoreKind.ATTENTION,
        "prefill='window' with policy {c.name!r}",
        "{c.name!r} does not rank tokens by attention",
        NO_OP,
    ),
    Conflict(
        lambda c: c.observation_window != type(c).observation_window and not _asks_window(c),
        "observation_window={c.observation_window!r}",
        "prefill={c.prefill!r} with score={c.score_name!r} lets every query of a prompt score",
        NO_OP,
    ),
    Conflict(
        lambda c: c.window_score != type(c).window_score and not _has_window(c),
        "window_score={c.window_score!r}",
        "prefill={c.prefill!r} adds up what every query of a prompt gives",
        NO_OP,
    ),
    Conflict(
        lambda c: c.window_lifetime != type(c).window_lifetime and not c.ranking.window,
        "window_lifetime={c.window_lifetime!r}",
        "score={c.score_name!r} adds nothing that an observation window gives",
        NO_OP,
    ),
    Conflict(
        lambda c: c.observation_window < (2 if c.ranking.window else 1) and _asks_window(c),
        "observation_window={c.observation_window!r}",
        "no query scores",
        NO_OP,
    ),
    Conflict(
        lambda c: _has_window(c) and c.ranking.by_age,
        "prefill='window' with score={c.score_name!r}",
        "a mean counts every query of the prompt, and only the last ones score",
        NOT_BUILT,
    ),
    Conflict(
        lambda c: c.granularity == "block" and c.ranking.by_age,
        "granularity='block' with score={c.score_name!r}",
        "means are ranked token by token",
        NOT_BUILT,
    ),
    Conflict(
        lambda c: c.granularity == "block" and _has_basis(c),
        "granularity='block' with budget_basis={c.budget_basis!r}",
        "the pages of a short request may all be recent",
        NOT_BUILT,
    ),
    Conflict(
        lambda c: c.granularity == "block" and _evicts_together(c),
        "granularity='block' with evict_every={c.evict_every!r}",
        "a page is evicted at a time already, for as many tokens as it has slots",
        NOT_BUILT,
    ),
    Conflict(
        lambda c: c.merges and c.granularity == "block",
        "merge={c.merge!r}",
        "granularity={c.granularity!r} evicts the tokens of a page together",
        NOT_BUILT,
    ),
    Conflict(
        lambda c: c.merges and _evicts_together(c),
        "merge={c.merge!r}",
        "evict_every={c.evict_every!r} packs survivors, and overwrites no token that could merge",
        NOT_BUILT,
    ),
    Conflict(
        lambda c: _has_pressure(c) and c.prefill == "chunked",
        "eviction='pressure' with prefill='chunked'",
        "each chunk of a prompt is cut to the budget",
        "nothing would be left to give back when memory is short",
    ),
    Conflict(
        lambda c: c.position_limit is not None and not c.rolls,
        "position_limit={c.position_limit!r}",
        "positions={c.positions!r} grow with the text",
        NO_OP,
    ),
    Conflict(
        lambda c: c.rolls and c.prefill != "chunked",
        "positions={c.positions!r}",
        "prefill={c.prefill!r} keeps a prompt whole until its end",
        "a prompt, or what a request that was thrown out computes again, may have more tokens than "
        "there are positions; prefill='chunked' evicts after each chunk",
    ),
    Conflict(
        lambda c: c.rolls and (c.ranking.second_pass is not None or c.ranking.window),
        "positions={c.positions!r}",
        "score={c.score_name!r} has scoring passes at positions of their own",
        NOT_BUILT,
    ),
    Conflict(
        lambda c: c.rolls and c.granularity == "block",
        "positions={c.positions!r}",
        "granularity={c.granularity!r} leaves slots free that hold positions of evicted tokens",
        NOT_BUILT,
    ),
    Conflict(
        lambda c: c.rolls and c.merges,
        "positions={c.positions!r}",
        "merge={c.merge!r} makes keys of several positions one",
        NOT_BUILT,
    ),
    Conflict(
        lambda c: c.continuation and _has_pressure(c),
        "continuation=true",
        "eviction={c.eviction!r} keeps every token while there is room",
        NOT_BUILT,
    ),
    Conflict(
        lambda c: c.continuation and _has_basis(c),
        "continuation=true",
        "budget_basis={c.budget_basis!r} gives each turn a budget of its own",
        "a turn continues only from one of the same budget",
    ),
    Conflict(
        lambda c: c.continuation and c.merges,
        "continuation=true",
        "merge={c.merge!r} makes tokens stand for several, which prompts do not attend to",
        NOT_BUILT,
    ),
    Conflict(
        lambda c: c.continuation and c.rolls,
        "continuation=true",
        "positions={c.positions!r} change while a conversation goes on",
        NOT_BUILT,
    ),
    Conflict(
        lambda c: c.pressure_watermark != type(c).pressure_watermark and not _has_pressure(c),
        "pressure_watermark={c.pressure_watermark!r}",
        "eviction={c.eviction!r} does not ask how much is free",
        NO_OP,
    ),
)


def check_together(config: Any) -> None:
    """Refuse the first conflict of a configuration.

    Raises:
        ConfigError: for options that do not go together.

    """
    for conflict in CONFLICTS:
        if conflict.applies(config):
            raise ConfigError(
                conflict.asked.format(c=config),
                conflict.found.format(c=config),
                conflict.why,
                "leave it out, or change the other option",
            )


def check_unread(config: Any) -> None:
    """Refuse an option that the policy does not read.

    Raises:
        ConfigError: for a value other than the default of such an option.

    """
    read = config.policy.options
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in {"name", "budget", "kernels", *read} or value == field.default:
            continue
        raise ConfigError(
            f"{field.name}={value!r} with policy {config.name!r}",
            f"{config.name!r} reads {', '.join(sorted(read)) or 'no options'}",
            "an option that nothing reads would be a silent no-op",
            f"leave {field.name} out, or choose another policy",
        )
