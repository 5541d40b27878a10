# SPDX-License-Identifier: Apache-2.0
"""One option of the configuration, described once: for ``--help``, documentation and checks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from vllm_h2o.errors import ConfigError

Interval = Literal["[0, 1]", "(0, 1]", "[0, 1)"]
Reader = Literal["every", "evicts", "ranks", "window"]
"""Policies that read an option: every one, or those that evict, rank, or have a window term."""

PLACES = re.compile(r"(?:([1-9]\d{0,6}),)?([^,:\s][^,:]*/[^,:]*|/[^,:]*)(?::([1-9]\d{0,6}))?")
"""A path with a slash and without comma or colon; GiB of memory may stand before it, and GiB of
files after it."""
LARGEST = 2**31 - 1
"""Largest whole number of any option (int32)."""


@dataclass(frozen=True)
class Values:
    """The values that an option takes.

    Args:
        words: names, or a function that returns them.
        least: smallest whole number; None: no whole numbers.
        fraction: the interval of fractions; None: no fractions.
        switch: whether it takes true and false.
        missing: whether it takes None.
        path: whether it takes a path, as :data:`PLACES` says.

    """

    words: Iterable[str] | Callable[[], Iterable[str]] = ()
    least: int | None = None
    fraction: Interval | None = None
    switch: bool = False
    missing: bool = False
    path: bool = False

    def __contains__(self, value: object) -> bool:
        if value is None:
            return self.missing
        if isinstance(value, bool):
            return self.switch
        if isinstance(value, str):
            return value in self.names() or bool(self.path and PLACES.fullmatch(value))
        if isinstance(value, int) and self.least is not None and self.least <= value <= LARGEST:
            return True
        if self.fraction is None or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        above = value >= 0 if self.fraction.startswith("[") else value > 0
        below = value <= 1 if self.fraction.endswith("]") else value < 1
        return above and below

    def __str__(self) -> str:
        numbers = [f"a whole number from {self.least}"] if self.least is not None else []
        numbers += [f"a fraction in {self.fraction}"] if self.fraction else []
        every = [*numbers, *self.names(), *(["true", "false"] if self.switch else [])]
        every += (
            ["a path with a slash, without comma or colon (/PATH, /PATH:N, N,/PATH or N,/PATH:N)"]
            if self.path
            else []
        )
        return " or ".join(part for part in (", ".join(every[:-1]), every[-1]) if part)

    def names(self) -> tuple[str, ...]:
        """The names among the values."""
        return tuple(self.words() if callable(self.words) else self.words)


def option(
    default: Any,
    meaning: str,
    *,
    words: Iterable[str] | Callable[[], Iterable[str]] = (),
    least: int | None = None,
    fraction: Interval | None = None,
    path: bool = False,
    read_by: Reader = "evicts",
    shown: str | None = None,
) -> Any:
    """A field of the configuration.

    Args:
        default: its default.
        meaning: what it does, for users: one sentence without its full stop.
        words: names that it takes, or a function that returns them.
        least: smallest whole number that it takes.
        fraction: interval of fractions that it takes.
        path: whether it takes a path.
        read_by: policies that read it.
        shown: the default in words, where the value does not say it.

    """
    values = Values(words, least, fraction, isinstance(default, bool), default is None, path)
    metadata = {
        "meaning": meaning,
        "values": values,
        "read_by": read_by,
        "shown": shown if shown is not None else _written(default),
    }
    return field(default=default, metadata=metadata)


def check_value(described: Field[Any], value: object) -> None:
    """Refuse a value that an option does not take.

    Raises:
        ConfigError: for such a value.

    """
    name, values = described.name, described.metadata["values"]
    if value in values:
        return
    close = get_close_matches(str(value), values.names(), n=1)
    raise ConfigError(
        f"{name}={value!r}",
        f"{name} takes {values}",
        described.metadata["meaning"],
        f"did you mean {close[0]!r}?" if close else f"give one of these, or leave {name} out",
    )


def help_line(described: Field[Any]) -> str:
    """``name: what it does (default: its default)``."""
    meaning, shown = described.metadata["meaning"], described.metadata["shown"]
    return f"{described.name}: {meaning} (default: {shown})"


def table_row(described: Field[Any]) -> str:
    """A row of the table in docs/options.md."""
    meaning, shown = described.metadata["meaning"], described.metadata["shown"]
    return f"| `{described.name}` | {meaning}. | {shown} |"


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
