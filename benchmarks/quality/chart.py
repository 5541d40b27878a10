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
COLORS = ("#1f77b4", "#17becf", "#d62728", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b")
GREYS = ("#222222", "#555555", "#777777", "#999999", "#aaaaaa", "#bbbbbb")
MARKERS = "os*D^vxPXhd<>"


def panel(row: Mapping[str, Any]) -> str:
    """The panel that a row belongs to."""
    forced = (row["forced"],) if row["task"] == "prose" else ()
    return " ".join(map(str, (row["task"], row["length"], *forced)))


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A panel for each task, a line for each policy in colour and each press in grey.

    Args:
        rows: of one model.
        path: of the image.

    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "quality"
    shown = [name for name in PANELS if any(panel(row) == name for row in rows)]
    figure, axes = pyplot.subplots(1, len(shown), figsize=(4.6 * len(shown), 3.9), squeeze=False)
    names = dict.fromkeys(row["policy"] for row in rows if row["policy"] != "full")
    presses = [name for name in names if name not in POLICIES]
    styles = dict(zip((*POLICIES, *presses), MARKERS, strict=False))
    colors = dict(zip((*POLICIES, *presses), COLORS[: len(POLICIES)] + GREYS, strict=False))
    for axis, name in zip(axes[0], shown, strict=True):
        mine = [row for row in rows if panel(row) == name]
        costs = name.startswith("prose")
        column, unit = ("above_full", 1) if costs else ("mean", 100)
        for policy in names:
            points = sorted(
                (100 * float(r["share"]), unit * float(r[column]))
                for r in mine
                if r["policy"] == policy
            )
            if points:
                axis.plot(
                    *zip(*points, strict=True),
                    color=colors[policy],
                    marker=styles[policy],
                    markersize=4,
                    linestyle="-" if policy in POLICIES else ":",
                    label=policy if policy in POLICIES else f"kvpress {policy}",
                )
        if costs:
            axis.set_yscale("log")
        else:
            full = next(100 * float(r["mean"]) for r in mine if r["policy"] == "full")
            axis.axhline(full, color="black", linewidth=0.8, linestyle="--", label="full cache")
            axis.set_ylim(-3, 103)
        axis.set_ylabel(PANELS[name])
        axis.set_xlabel("budget, % of the tokens")
        axis.grid(alpha=0.3)
    handles = {
        label: handle
        for axis in axes[0]
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncols=min(7, len(handles)), fontsize=8
    )
    figure.suptitle(f"{rows[0]['model']}, judged after eviction", fontsize=10)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.savefig(path, metadata={"Creator": None, "Date": None})


def main() -> None:
    """Read some CSV files and draw."""
    *tables, out = map(Path, sys.argv[1:])
    draw([row for table in tables for row in csv.DictReader(table.open(newline=""))], out)


if __name__ == "__main__":
    main()
