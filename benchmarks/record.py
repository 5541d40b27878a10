# SPDX-License-Identifier: Apache-2.0
"""Rows of figures, each with the machine that they were measured on."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def cores() -> list[int]:
    """Return the cores that this process may run on; all, where the system has no pins."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def machine_name() -> str:
    """The processor, as the system names it, and its cores; where pinned, to how many of them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next(names, platform.processor() or platform.machine())
    pin = "" if len(cores()) == os.cpu_count() else f"{len(cores())} of "
    return f"{name}, {pin}{os.cpu_count()} cores"


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to a CSV file, which gets a header when it is new.

    Args:
        path: the file.
        rows: one mapping of column to value each; all of the same columns.

    Raises:
        ValueError: when the file has other columns.

    """
    new = not path.exists()
    if not new:
        with path.open(newline="") as file:
            found = next(csv.reader(file))
        if found != list(rows[0]):
            raise ValueError(f"{path} has the columns {found}, not {list(rows[0])}: move it away")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if new:
            writer.writeheader()
        writer.writerows(rows)
