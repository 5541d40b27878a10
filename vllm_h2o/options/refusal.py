# SPDX-License-Identifier: Apache-2.0
"""A refusal of one thing that no policy supports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_h2o.errors import UnsupportedError
from vllm_h2o.options.capabilities import Setup
from vllm_h2o.options.remedies import Remedy, advice


@dataclass(frozen=True)
class Refusal:
    """One thing that no policy supports.

    Args:
        what: the thing as the user knows it, after "the engine has".
        applies: whether a setup has it.
        why: the reason.
        remedy: what to do, by the arguments that led to it.

    """

    what: str
    applies: Callable[[Setup], bool]
    why: str
    remedy: Remedy


def refuse(refusals: Iterable[Refusal], setup: Setup, asked: str, subject: str) -> None:
    """Stop at the first refusal that applies.

    Args:
        refusals: in their order.
        setup: the policy and the engine.
        asked: what the user asked for.
        subject: what has the refused thing, with a verb: "the engine has".

    Raises:
        UnsupportedError: with the refusal's reason and remedy.

    """
    for refusal in refusals:
        if refusal.applies(setup):
            found = f"{subject} {refusal.what}"
            remedy = advice(refusal.remedy, setup.given)
            raise UnsupportedError(asked, found, refusal.why, remedy)
