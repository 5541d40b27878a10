# SPDX-License-Identifier: Apache-2.0
"""Remedies: how to leave a refused state, by the arguments of vLLM that led to it.

An argument is a field of vLLM's EngineArgs: a flag of its commands, and a keyword of ``LLM``. A
remedy names those that the user gave, and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Any

Given = frozenset[str]
"""Names of the arguments with another value than vLLM's default."""
Remedy = str | Callable[[Given], str]
"""An imperative clause; where it depends on them, of the arguments that were given."""

ANOTHER_MODEL = "run this model without --kv-policy"
TEXT_ALONE = f"serve text alone with --language-model-only, or {ANOTHER_MODEL}"
SPECULATIVE = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
"""Arguments that lead to speculative decoding."""
OF_THE_CONFIG = ("hf_overrides", "hf_config_path")
"""Arguments that change what a model's config says."""


def given_arguments(engine_args: Any) -> Given:
    """Return the names of the arguments that are not at their defaults.

    Args:
        engine_args: vLLM's EngineArgs, before anybody changes them.

    """
    return frozenset(
        field.name
        for field in fields(engine_args)
        if getattr(engine_args, field.name) != _default(field)
    )


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def advice(remedy: Remedy, given: Given) -> str:
    """Return what to do, for a user who gave these arguments."""
    return remedy if isinstance(remedy, str) else remedy(given)


def flag(argument: str) -> str:
    """Return the flag of an argument."""
    return f"--{argument.replace('_', '-')}"


def flags(arguments: tuple[str, ...], given: Given) -> str:
    """Return the flags of those arguments that were given, as "--a, --b and --c"."""
    *first, last = [flag(name) for name in arguments if name in given] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def leave_out(*arguments: str, otherwise: str, instead: str = "") -> Remedy:
    """Return the remedy that leaves out what was given.

    Args:
        arguments: those that lead to the state.
        otherwise: what to do where none of them was given.
        instead: what to do after that, or as well.

    """

    def remedy(given: Given) -> str:
        named = flags(arguments, given)
        return f"leave {named} out{instead}" if named else otherwise

    return remedy


def other_model(*arguments: str, otherwise: str = ANOTHER_MODEL) -> Remedy:
    """Return the remedy for what a model is, or is made by an argument.

    Args:
        arguments: those that make a model so, whatever its config says.
        otherwise: what to do about the model itself.

    """

    def remedy(given: Given) -> str:
        if named := flags(arguments, given):
            return f"leave {named} out, or {otherwise}"
        changed = flags(OF_THE_CONFIG, given)
        return f"{otherwise}, or change what makes it so in {changed}" if changed else otherwise

    return remedy


def another_dtype(supported: str) -> Remedy:
    """Return the remedy for K and V in a dtype that was asked for, or is the checkpoint's own.

    Args:
        supported: values of ``--kv-cache-dtype``.

    """

    def remedy(given: Given) -> str:
        own = "bfloat16, or whichever dtype the model computes in"
        return f"use --kv-cache-dtype {supported if 'kv_cache_dtype' in given else own}"

    return remedy
