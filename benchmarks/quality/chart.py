# SPDX-License-Identifier: Apache-2.0
"""The figures as a chart: ``python -m benchmarks.quality.chart CSV [CSV ...] OUT.svg``."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PANELS = {
    "asked_now 1024": ("the question is in the prompt", "facts found, %"),
    "asked_later 1024": ("the question comes after eviction", "facts found, %"),
    "prose 1024 768": ("text that goes on", "nats per token above the full cache"),
}
"""By task, length and, for prose, tokens that are forced: a title, and what the axis says."""
OURS = {
    "h2o2": ("h2o2", "#d62728"),
    "h2o2 reconstruction": ("h2o2, score=reconstruction", "#e377c2"),
    "h2o mean_squares merge": ("h2o, score=mean_squares, merge=0.8", "#ff7f0e"),
    "snapkv": ("snapkv", "#9467bd"),
    "h2o": ("h2o", "#1f77b4"),
    "streaming": ("streaming", "#2ca02c"),
    "local": ("local", "#8c564b"),
}
"""By the name in tables: the label, and a colour."""
MARKERS = "os*D^vxPXhd<>1234"


def panel(row: Mapping[str, Any]) -> str | None:
    """The panel of a row, of the engine or of a press; prose of the engine alone.

    A press holds what follows the context next to its budget, so its prose is not comparable.
    """
    if row["by"].startswith("simulation"):
        return None
    name = f"{row['task']} {row['length']}"
    if row["task"] == "prose":
        name += f" {row['forced']}" if row["by"].startswith("engine") else " pressed"
    return name if name in PANELS else None


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A panel for each task, a line for each policy in colour and each press in grey.

    Args:
        rows: of one model; of equal ones the last counts, and other variants do not.
        path: of the image.

    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "quality"
    shown = [name for name in PANELS if any(panel(row) == name for row in rows)]
    figure, axes = pyplot.subplots(1, len(shown), figsize=(4.6 * len(shown), 3.9), squeeze=False)
    pressed = [row["policy"] for row in rows if panel(row) and row["by"].startswith("kvpress")]
    presses = [policy for policy in dict.fromkeys(pressed) if policy != "full"]
    greys = {press: f"{0.75 - 0.65 * i / len(presses):.2f}" for i, press in enumerate(presses)}
    handles: dict[str, Any] = {}
    for axis, name in zip(axes[0], shown, strict=True):
        handles |= _fill(axis, name, [row for row in rows if panel(row) == name], greys)
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncols=min(5, len(handles)), fontsize=8
    )
    figure.tight_layout(rect=(0, 0.17, 1, 1))
    figure.savefig(path, metadata={"Creator": None, "Date": None})


def _fill(
    axis: Any, name: str, rows: Sequence[Mapping[str, Any]], greys: Mapping[str, str]
) -> dict[str, Any]:
    """Draw one panel, the presses in their greys; its lines by their labels."""
    costs = name.startswith("prose")
    # Of two full caches, the engine's.
    rows = sorted(rows, key=lambda row: row["by"].startswith("engine"))
    column, unit = ("above_full", 1) if costs else ("mean", 100)
    last = {(row["policy"], 100 * float(row["share"])): unit * float(row[column]) for row in rows}
    for marker, policy in zip(MARKERS, (*OURS, *greys), strict=False):
        points = sorted((share, value) for (of, share), value in last.items() if of == policy)
        if not points:
            continue
        label, color = OURS.get(policy, (f"kvpress {policy}", greys.get(policy)))
        axis.plot(
            *zip(*points, strict=True),
            color=color,
            marker=marker,
            markersize=4,
            linestyle=":" if policy in greys else "-",
            linewidth=1 if policy in greys else 2,
            label=label,
        )
    if costs:
        axis.set_yscale("log")
    else:
        axis.axhline(last["full", 100.0], color="black", linestyle="--", label="full cache")
        axis.set_ylim(-3, 103)
    title, unit_name = PANELS[name]
    axis.set_title(title, fontsize=10)
    axis.set_ylabel(unit_name)
    axis.set_xlabel("budget, % of the tokens")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    lines, labels = axis.get_legend_handles_labels()
    return dict(zip(labels, lines, strict=True))


def main() -> None:
    """Read some CSV files and draw."""
    *tables, out = map(Path, sys.argv[1:])
    found = [table.read_text() for table in tables if table.is_file()]
    draw([row for text in found for row in csv.DictReader(text.splitlines())], out)


if __name__ == "__main__":
    main()
