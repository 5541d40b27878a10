"""The figures as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """One line for each policy and budget, as Markdown."""
    columns = ("policy", "share", "slots", "nll_above_full", "std_over_windows", "passkey")
    print("| " + " | ".join(columns) + " |", flush=True)
    print("| --- |" + " ---: |" * (len(columns) - 1))
    for row in rows:
        print("| " + " | ".join(str(row[column]) for column in columns) + " |", flush=True)
