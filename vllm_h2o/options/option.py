"""One option of the configuration, described once: for ``--help``, documentation and checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, field
from typing import Any


def option(
    default: Any,
    meaning: str,
    *,
    choices: Sequence[str] = (),
    bits: int = 0,
    fraction: str = "",
    shown: str | None = None,
) -> Any:
    """A field of the configuration.

    Args:
        default: its default.
        meaning: what it does, for users.
        choices: the values that it takes, if they are names.
        bits: largest size of a whole number, if it is one.
        fraction: what it is a fraction of, in [0, 1], if it is one.
        shown: the default in words, where the value does not say it.

    """
    metadata = {
        "meaning": meaning,
        "choices": tuple(choices),
        "bits": bits,
        "fraction": fraction,
        "shown": shown if shown is not None else str(default),
    }
    return field(default=default, metadata=metadata)


def help_line(described: Field[Any]) -> str:
    """``name: what it does; its default``."""
    return f"{described.name}: {described.metadata['meaning']}; {described.metadata['shown']}"


def table_row(described: Field[Any]) -> str:
    """A row of the table in docs/options.md."""
    cells = (f"`{described.name}`", described.metadata["meaning"], described.metadata["shown"])
    return f"| {' | '.join(cells)} |"
