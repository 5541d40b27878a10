"""Checks of one option at a time: what its description says that it takes."""

from __future__ import annotations

import math
from dataclasses import Field, fields
from difflib import get_close_matches
from typing import Any, TypeGuard

from vllm_h2o.errors import ConfigError
from vllm_h2o.policy import POLICIES


def check_fields(config: Any) -> None:
    """Refuse the first value that its option does not take.

    Raises:
        ConfigError: for a value that is of no use, whatever the others are.

    """
    _check_name(config.name)
    _check_budget("budget", config.budget)
    if config.max_budget is not None:
        _check_budget("max_budget", config.max_budget)
    for check in (_check_count, _check_fraction, _check_choice):
        for field in fields(config):
            check(field, getattr(config, field.name))


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


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)
