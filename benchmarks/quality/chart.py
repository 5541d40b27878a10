"""The figures as a chart: ``python -m benchmarks.quality.chart CSV [CSV ...] OUT.svg``."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.plans import POLICIES

PANELS = {
    "prose 1024 768": "nats per token above the full cache",
    "passkey 1024": "pass keys found, %",
    "pairs 1024": "codes found, %",
}
"""By task, length and, for prose, tokens that are forced: what the axis says."""
COLORS = ("#1f77b4", "#17becf", "#d62728", "#ff7f0e", "#2ca02c", "#e377c2", "#9467bd", "#8c564b")
GREYS = ("#222222", "#555555", "#777777", "#999999", "#aaaaaa", "#bbbbbb")
MARKERS = "os*D^vxPXhd<>"


def panel(row: Mapping[str, Any]) -> str | None:
    """The panel of a row: prose as the engine ran it; answers where every budget was tried."""
    if row["task"] == "prose":
        name = f"prose {row['length']} {row['forced']}"
        return name if name in PANELS and row["by"].startswith("engine") else None
    name = f"{row['task']} {row['length']}"
    return name if name in PANELS and not row["by"].startswith("engine") else None


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
    handles: dict[str, Any] = {}
    for axis, name in zip(axes[0], shown, strict=True):
        handles |= _fill(axis, name, [row for row in rows if panel(row) == name])
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncols=min(7, len(handles)), fontsize=8
    )
    figure.suptitle(f"{rows[0]['model']}, judged after eviction", fontsize=10)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.savefig(path, metadata={"Creator": None, "Date": None})


def _fill(axis: Any, name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Draw one panel; its lines by their labels."""
    costs = name.startswith("prose")
    column, unit = ("above_full", 1) if costs else ("mean", 100)
    last = {(row["policy"], 100 * float(row["share"])): unit * float(row[column]) for row in rows}
    pressed = [row["policy"] for row in rows if row["by"].startswith("kvpress")]
    presses = [policy for policy in dict.fromkeys(pressed) if policy != "full"]
    for policy in (*POLICIES, *presses):
        points = sorted((share, value) for (of, share), value in last.items() if of == policy)
        if not points:
            continue
        ours = policy in POLICIES
        index = list(POLICIES).index(policy) if ours else presses.index(policy)
        axis.plot(
            *zip(*points, strict=True),
            color=(COLORS if ours else GREYS)[index],
            marker=MARKERS[index],
            markersize=4,
            linestyle="-" if ours else ":",
            label=policy if ours else f"kvpress {policy}",
        )
    if costs:
        axis.set_yscale("log")
    else:
        axis.axhline(last["full", 100.0], color="black", linestyle="--", label="full cache")
        axis.set_ylim(-3, 103)
    axis.set_ylabel(PANELS[name])
    axis.set_xlabel("budget, % of the tokens")
    axis.grid(alpha=0.3)
    lines, labels = axis.get_legend_handles_labels()
    return dict(zip(labels, lines, strict=True))


def main() -> None:
    """Read some CSV files and draw."""
    *tables, out = map(Path, sys.argv[1:])
    found = [table for table in tables if table.is_file()]
    draw([row for table in found for row in csv.DictReader(table.open(newline=""))], out)


if __name__ == "__main__":
    main()
