# SPDX-License-Identifier: Apache-2.0
"""Figures as rows of a CSV, and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.tasks import Task
from benchmarks.record import append_rows, machine_name
from benchmarks.smollm2 import MODEL


def row(
    by: str,
    task: Task,
    policy: str,
    share: float,
    slots: int,
    figures: Sequence[float],
    full: Sequence[float],
    model: str = MODEL,
) -> dict[str, Any]:
    """Make the row of one policy with one budget.

    Args:
        by: what ran it, with its version.
        task: what was run.
        policy: or press.
        share: of the task's length.
        slots: tokens, as asked for.
        figures: of the task, one for each window or answer.
        full: the same with the full cache.
        model: its name.

    """
    excess = [ours - theirs for ours, theirs in zip(figures, full, strict=True)]
    return {
        "machine": machine_name(),
        "by": by,
        "model": model,
        "task": task.name,
        "length": task.length,
        "forced": task.tail.shape[1],
        "policy": policy,
        "share": share,
        "slots": slots,
        "count": len(figures),
        "mean": round(statistics.fmean(figures), 4),
        "above_full": round(statistics.fmean(excess), 4),
        "std": round(statistics.stdev(excess), 4),
        "worse_than_full": sum(
            (ours > theirs) if task.costs else (ours < theirs)
            for ours, theirs in zip(figures, full, strict=True)
        ),
        "each": " ".join(f"{x:.{task.decimals}f}" for x in figures),
    }


def record(found: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """Print a row, append it to a CSV, and return it."""
    shown = ("task", "length", "policy", "share", "slots", "count", "mean", "above_full", "std")
    print(*(found[column] for column in shown), flush=True)
    if path:
        append_rows(path, [found])
    return found


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """One line for each task, length and budget as Markdown, one column for each policy."""
    policies = list(dict.fromkeys(found["policy"] for found in rows))
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for found in rows:
        key = (found["task"], found["length"], found["forced"], found["share"], found["slots"])
        costs = found["task"] == "prose"
        text = f"{found['above_full']} ± {found['std']}" if costs else str(found["mean"])
        lines.setdefault(key, {})[found["policy"]] = text
    head = ("task", "length", "forced", "share", "slots", *policies)
    print("| " + " | ".join(head) + " |")
    print("| --- |" + " ---: |" * (len(head) - 1))
    for key, cells in lines.items():
        print("| " + " | ".join([*map(str, key), *(cells.get(p, "") for p in policies)]) + " |")
