# SPDX-License-Identifier: Apache-2.0
"""Errors of this package, and the form of their messages.

::

    KVPolicyError(ValueError)      what is not supported, why, and what to do
    ├── ConfigError                a value of the policy's own configuration
    ├── UnsupportedError           a model, engine option or platform that the policy refuses
    ├── SparsityError            what contextual sparsity refuses
    └── PatchError                 a vLLM other than the one that the plugin was written against
    IntegrityError(RuntimeError)   a broken invariant of pages or lengths: a bug, never bad input
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType


class KVPolicyError(ValueError):
    """A refusal, shown as "ASKED is not supported: FOUND. WHY. REMEDY."

    Args:
        asked: what the caller asked for, as a noun in the singular.
        found: a clause: the fact that the engine found.
        why: a clause: the reason why both cannot be had.
        remedy: an imperative clause: what to do instead.

    """

    part = "kv-policy"
    """The part of this package that refuses."""

    def __init__(self, asked: str, found: str, why: str, remedy: str) -> None:
        self.asked, self.found, self.why, self.remedy = asked, found, why, remedy
        super().__init__(asked, found, why, remedy)

    def __str__(self) -> str:
        first = f"{self.part}: {self.asked} is not supported: {self.found}"
        return " ".join(map(_sentence, (first, self.why, self.remedy)))


class ConfigError(KVPolicyError):
    """A value of the policy's own configuration cannot be used."""


class UnsupportedError(KVPolicyError):
    """The policy does not support the model, an engine option or the platform."""


class SparsityError(KVPolicyError):
    """Contextual sparsity cannot be used with an option, a model or a part of the engine."""

    part = "contextual-sparsity"


class PatchError(KVPolicyError):
    """A patched or relied-upon symbol of vLLM is not the one that is known."""


class IntegrityError(RuntimeError):
    """An invariant of page or length accounting does not hold: a bug in this package."""


def end_plainly() -> None:
    """Have the ``vllm`` command end with a refusal's sentences alone, without a traceback."""
    if Path(sys.argv[0]).name == "vllm" and sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_refusal


def _print_refusal(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if isinstance(error, KVPolicyError):
        print(error, file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


def _sentence(clause: str) -> str:
    """Return a clause with a full stop, and a capital letter unless it begins with a name."""
    word = clause.split(" ", 1)[0].rstrip(",")
    plain = word.replace("-", "") if word[:1].isalpha() else word  # not a flag
    if plain.isalpha() and word.islower():
        clause = clause[0].upper() + clause[1:]
    return clause if clause.endswith((".", "?")) else f"{clause}."
