"""What each option's value may be, whatever the others are."""

from __future__ import annotations

import math
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeGuard

from vllm_h2o.errors import ConfigError
from vllm_h2o.policy import POLICIES


def check_values(config: Any) -> None:
    """Refuse the first value of a configuration that cannot be used.

    Raises:
        ConfigError: for that value.

    """
    _check_name(config.name)
    _check_budget("budget", config.budget)
    if config.max_budget is not None:
        _check_budget("max_budget", config.max_budget)
    for field in fields(config):
        if field.metadata["bits"]:
            _check_count(field.name, getattr(config, field.name), field.metadata["bits"])
    ratio = 0.5 if config.recent_ratio is None else config.recent_ratio
    if not _is_number(ratio) or not 0 <= ratio <= 1:
        raise ConfigError(
            f"recent_ratio={config.recent_ratio!r}",
            "a fraction of the budget is a number in [0, 1]",
            "there is no such fraction",
            "give a number in [0, 1]; 0.5 is the paper's",
        )
    for field in fields(config):
        if field.metadata["choices"]:
            _check_choice(field.name, getattr(config, field.name), field.metadata["choices"])


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name not in POLICIES:
        close = get_close_matches(str(name), POLICIES, n=1)
        raise ConfigError(
            f"policy {name!r}",
            f"the policies are {', '.join(POLICIES)}",
            "there is no policy of that name",
            f"did you mean {close[0]!r}?" if close else "choose one of them",
        )


def _check_budget(field: str, budget: object) -> None:
    good = _is_number(budget) and (0 < budget <= 1 or (isinstance(budget, int) and budget > 0))
    if not good and budget != "full":
        raise ConfigError(
            f"{field}={budget!r}",
            "a budget is an int > 0 (slots), a float in (0, 1] (a fraction), or 'full'",
            "no number of slots follows from it",
            "give e.g. 512 or 0.2",
        )


def _check_count(field: str, value: object, bits: int) -> None:
    if field == "num_sink_tokens" and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**bits:
        raise ConfigError(
            f"{field}={value!r}",
            f"{field} is a whole number of at most {bits} bits",
            "it counts things, or seeds them",
            f"give an int in [0, 2**{bits})",
        )


def _check_choice(field: str, value: object, works: tuple[str, ...]) -> None:
    if value in works or (field == "score" and value is None):
        return
    raise ConfigError(
        f"{field}={value!r}",
        f"what works is {', '.join(works)}",
        "there is no such choice",
        f"use {field}={works[0]!r}",
    )


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)
