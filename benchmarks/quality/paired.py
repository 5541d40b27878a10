# SPDX-License-Identifier: Apache-2.0
"""Answers against the full cache's, pair by pair: ``python -m benchmarks.quality.paired CSV``."""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def each(row: Mapping[str, Any]) -> list[float]:
    """The figures of a row, one for each window or answer."""
    return [float(figure) for figure in str(row["each"]).split()]


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The mean difference of pairs, and its standard error."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    return statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(ours))


def answered(ours: Sequence[float], full: Sequence[float]) -> tuple[float, float]:
    """Return the share found of the contexts that the full cache answers, and its error."""
    found = [hit for hit, reference in zip(ours, full, strict=True) if reference]
    if not found:
        return math.nan, math.nan
    share = statistics.fmean(found)
    return share, math.sqrt(share * (1 - share) / len(found))


def lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A Markdown table: what was found, less what the full cache finds, by policy and budget.

    Args:
        rows: of answers, as :func:`benchmarks.quality.tables.row` makes them; of equal ones the
            last counts.

    """
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    full: dict[str, list[float]] = {}
    for row in rows:
        task = f"{row['task']} {row['length']}"
        if row["policy"] == "full":
            full[task] = each(row)
        else:
            at = (task, f"{100 * float(row['share']):.0f} %: {row['slots']}")
            found.setdefault(at, {})[row["policy"]] = each(row)
    policies = list(dict.fromkeys(policy for cells in found.values() for policy in cells))
    table = [
        "| " + " | ".join(("task", "budget", "full cache", *policies)) + " |",
        "| --- | --- |" + " ---: |" * (len(policies) + 1),
    ]
    for (task, budget), cells in found.items():
        texts = [f"{statistics.fmean(full[task]):.2f} (n = {len(full[task])})"]
        for policy in policies:
            texts.append(_cell(cells[policy], full[task]) if policy in cells else "")
        table.append("| " + " | ".join((task, budget, *texts)) + " |")
    return table


def _cell(ours: Sequence[float], full: Sequence[float]) -> str:
    difference, error = paired(ours, full)
    return f"{statistics.fmean(ours):.2f} ({difference:+.2f} ± {error:.2f})"


def main() -> None:
    """Read a CSV file and print the table."""
    with Path(sys.argv[1]).open(newline="") as file:
        print("\n".join(lines(list(csv.DictReader(file)))))


if __name__ == "__main__":
    main()
