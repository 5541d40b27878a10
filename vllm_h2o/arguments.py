# SPDX-License-Identifier: Apache-2.0
"""Read the arguments of ``vllm-h2o``: numbers, amounts of memory, files."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_h2o.errors import ConfigError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}I": 1024**power for power, unit in enumerate("KMGT", start=1)}


def memory_bytes(text: str) -> int:
    """Read bytes: ``24GiB``, ``24GB``, ``24G``, or a plain number that is not a forgotten unit."""
    number = text.rstrip("BbIiKkMmGgTt ")
    unit = text[len(number) :].strip().upper().removesuffix("B")
    try:
        value = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory; give e.g. 24GiB")
    if not unit and value < _UNITS["MI"]:
        raise argparse.ArgumentTypeError(f"{text} is {text} bytes; give a unit: {text}GiB")
    return value


def positive(text: str) -> int:
    """Read a whole number above 0."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def check_folder(flag: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before any work is done for it."""
    if path is None or (path.parent.is_dir() and not path.is_dir()):
        return
    raise ConfigError(
        f"{flag} {path}",
        "it is a folder" if path.is_dir() else f"there is no folder {path.parent}",
        "the command writes a file",
        "name a file in a folder that exists",
    )


def read_text(path: Path, flag: str) -> str:
    """Read a text file in UTF-8, or refuse it under the name of its flag."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{flag} {path}", str(error), "the command reads its text", "give a text file"
        ) from error
