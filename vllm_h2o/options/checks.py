"""Checks of one option at a time: what it takes, and what it comes to."""

from __future__ import annotations

import math
from dataclasses import Field, fields
from difflib import get_close_matches
from typing import Any, TypeGuard

from vllm_h2o.errors import ConfigError
from vllm_h2o.pages import num_pages
from vllm_h2o.policy import POLICIES, Budget
from vllm_h2o.policy.budget import minimum_slots


def check_fields(config: Any) -> None:
    """Refuse the first value that its option does not take.

    Raises:
        ConfigError: for a value that is of no use, whatever the others are.

    """
    _check_name(config.name)
    _check_budget("budget", config.budget)
    if config.max_budget is not None:
        _check_budget("max_budget", config.max_budget)
    for check in (_check_count, _check_fraction, _check_choice, _check_switch):
        for field in fields(config):
            check(field, getattr(config, field.name))
    if config.evict_every < 1:
        raise ConfigError(
            f"evict_every={config.evict_every!r}",
            "so many tokens are evicted at a time",
            "a full sequence would never have room for its next token",
            "give 1, which evicts a token with each new one, or more",
        )


def check_size(config: Any) -> None:
    """Refuse a budget of a policy without one, and a number of slots that is too small.

    Raises:
        ConfigError: for a budget that no engine could use.

    """
    if not config.policy.evicts:
        if isinstance(config.budget, int) or config.budget not in (
            1.0,
            "full",
            type(config).budget,
        ):
            raise ConfigError(
                f"budget={config.budget!r} with policy {config.name!r}",
                f"{config.name!r} keeps every token",
                "a budget would be ignored",
                "leave the budget out, or choose another policy",
            )
    elif isinstance(config.budget, int):
        slots = max(config.budget, config.min_budget)
        check_slots(config, slots, "that many slots", config.num_sinks)


def check_slots(config: Any, slots: int, meaning: str, num_sinks: int) -> None:
    """Refuse a budget with which a sequence does not go on.

    Args:
        config: with the budget.
        slots: what the budget comes to.
        meaning: ``slots``, in words.
        num_sinks: first tokens that are never evicted.

    Raises:
        ConfigError: when there are fewer.

    """
    least = minimum_slots(config.effective_recent_ratio, num_sinks)
    if slots < least:
        one = type(config.budget) is int and config.budget == 1
        hint = "; 1 is one slot, also from a client that writes 1.0 so: every token is 'full'"
        raise ConfigError(
            f"budget={config.budget!r}",
            meaning,
            f"{num_sinks} first tokens, the recent window and the next token need {least}",
            f"give a budget of at least {least}, or fewer sinks{hint if one else ''}",
        )


def check_cap(config: Any, slots: int, limit: int) -> None:
    """Refuse a budget above ``max_budget``: a request's, or the one of those that ask for none.

    Args:
        config: with the budget.
        slots: what the budget comes to.
        limit: what ``max_budget`` comes to.

    Raises:
        ConfigError: when it is above it.

    """
    if slots > limit:
        raise ConfigError(
            f"budget={config.budget!r}",
            f"that is {slots} slots, and max_budget={config.max_budget!r} is {limit}",
            "this server gives a request no more",
            f"ask for at most {config.max_budget!r}",
        )


def check_lengths(config: Any, max_model_len: int) -> None:
    """Refuse lengths that no sequence has.

    Args:
        config: the policy.
        max_model_len: longest sequence, in tokens.

    Raises:
        ConfigError: for a ``min_budget`` above it, or a ``score_skip_recent`` that skips it whole.

    """
    lengths = {
        "min_budget": (config.min_budget, "every sequence would be kept whole"),
    }
    if config.ranking.second_pass is None:  # which scores what other queries skip
        least = config.score_skip_recent + 1
        lengths["score_skip_recent"] = (least, "no query would score any token")
    for name, (least, why) in lengths.items():
        if least > max_model_len:
            raise ConfigError(
                f"{name}={getattr(config, name)!r}",
                f"max_model_len={max_model_len} is the longest sequence",
                why,
                f"give a {name} that is shorter, or leave it out",
            )


def check_pages(config: Any, budget: Budget, block_size: int, max_model_len: int) -> None:
    """Refuse a budget of which no page might be left to evict, where pages are.

    Args:
        config: with the budget.
        budget: what it comes to.
        block_size: slots of a page.
        max_model_len: longest sequence, in tokens.

    Raises:
        ConfigError: when recent tokens and sinks may touch all pages.

    """
    # Recent tokens lie in the prompt's pages and in evicted ones, both cut at either end.
    sinks, recent = (num_pages(n, block_size) for n in (budget.num_sinks, budget.num_recent))
    safe = sinks + recent + 2
    if budget.capacity // block_size <= safe and budget.capacity < max_model_len:
        raise ConfigError(
            f"granularity='block' with budget={config.budget!r}",
            f"that is {budget.capacity // block_size} pages of {block_size}, of which recent "
            f"tokens and sinks may touch {safe}",
            "no page might be left to evict",
            "give a larger budget, smaller pages (--block-size) or a smaller recent_ratio",
        )


def check_positions(config: Any, asked: str, budget: Budget, chunk: int, longest: int) -> None:
    """Refuse a budget that leaves no positions for a step's tokens, where positions roll.

    Args:
        config: with ``position_limit``.
        asked: the budget, in the user's words.
        budget: what it comes to.
        chunk: most tokens of one step.
        longest: most tokens of a request.

    Raises:
        ConfigError: when what is resident and such a step need more positions than there are.

    """
    if not config.rolls:
        return
    needed = min(max(budget.kept + chunk, budget.capacity + 1), longest)
    if needed > config.position_limit:
        raise ConfigError(
            f"{asked} with positions='rolling'",
            f"that is {budget.capacity} slots; with {chunk} tokens of a step (--max-num-batched-"
            f"tokens) that may be {needed} positions, and position_limit is "
            f"{config.position_limit}",
            "tokens that are resident have one position each, and those of a step follow them",
            "give a smaller budget, as a number of slots, or a smaller --max-num-batched-tokens",
        )


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name not in POLICIES:
        close = get_close_matches(str(name), POLICIES, n=1)
        raise ConfigError(
            f"policy {name!r}",
            f"the policies are {', '.join(POLICIES)}",
            "there is no policy of that name",
            f"did you mean {close[0]!r}?" if close else "choose one of them",
        )


def _check_budget(name: str, budget: object) -> None:
    good = _is_number(budget) and (0 < budget <= 1 or (isinstance(budget, int) and budget > 0))
    if not good and budget != "full":
        raise ConfigError(
            f"{name}={budget!r}",
            "a budget is an int > 0 (slots), a float in (0, 1] (a fraction), or 'full'",
            "no number of slots follows from it",
            "give e.g. 512 or 0.2",
        )


def _check_count(field: Field[Any], value: object) -> None:
    name, bits = field.name, field.metadata["bits"]
    if not bits or (value is None and field.default is None):
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**bits:
        raise ConfigError(
            f"{name}={value!r}",
            f"{name} is a whole number of at most {bits} bits",
            "it counts things, or seeds them",
            f"give an int in [0, 2**{bits})",
        )


def _check_fraction(field: Field[Any], value: object) -> None:
    whole = field.metadata["fraction"]
    if not whole or (value is None and field.default is None):
        return
    if not _is_number(value) or not 0 <= value <= 1:
        raise ConfigError(
            f"{field.name}={value!r}",
            f"a fraction {whole} is a number in [0, 1]",
            "there is no such fraction",
            f"give a number in [0, 1]; the default is {field.metadata['shown']}",
        )


def _check_choice(field: Field[Any], value: object) -> None:
    works = field.metadata["choices"]
    if not works or value in works or (value is None and field.default is None):
        return
    raise ConfigError(
        f"{field.name}={value!r}",
        f"what works is {', '.join(works)}",
        "there is no such choice",
        f"use {field.name}={works[0]!r}",
    )


def _check_switch(field: Field[Any], value: object) -> None:
    if field.type not in ("bool", "bool | None") or isinstance(value, bool):
        return
    if value is not None or field.type == "bool":
        raise ConfigError(
            f"{field.name}={value!r}",
            "it is on, or it is not",
            "there is no such choice",
            "give true or false, in lower case",
        )


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)
