# SPDX-License-Identifier: Apache-2.0
"""Draw the charts of throughput and of servers from their CSVs, as PNG and SVG.

Usage::

    python -m benchmarks.throughput.chart benchmarks/results/throughput-cpu.csv
    python -m benchmarks.throughput.chart benchmarks/results/serve-cpu.csv
"""

from __future__ import annotations

import csv
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.smollm2 import MODEL
from benchmarks.throughput.profiles import CPU, GPU, Profile
from benchmarks.throughput.runs import ratio_of

MEASURED = "#2a6f97"
COLORS = ("#2a6f97", "#c1121f", "#e09f3e")


def ratios(rows: list[dict[str, Any]], profile: Profile) -> list[float]:
    """Return the ratios of a profile's pairs on the machine of the last row."""
    machine = rows[-1]["machine"]
    mine = [r for r in rows if r["profile"] == profile.id and r["machine"] == machine]
    ours = [r for r in mine if r["side"] == "h2o"]
    theirs = [r for r in mine if r["side"] != "h2o"]
    return [ratio_of(profile, a, b) for a, b in zip(ours, theirs, strict=False)]


def draw(path: Path, target: Path) -> None:
    """Write ``target``.png and .svg: a bar for each profile, its pairs as points; or nothing.

    Args:
        path: the CSV.
        target: without a suffix.

    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "throughput"
    from matplotlib import pyplot

    with path.open() as file:
        rows = list(csv.DictReader(file))
    known = {p.id for p in (*CPU, *GPU)}
    rows = [row for row in rows if row["profile"] in known]
    profiles = [p for p in (*CPU, *GPU) if rows and ratios(rows, p)]
    if not profiles:
        return
    figure, axes = pyplot.subplots(figsize=(8, 0.8 + 0.5 * len(profiles)))
    for i, profile in enumerate(profiles):
        points = ratios(rows, profile)
        middle = statistics.median(points)
        axes.barh(i, middle, color=MEASURED, height=0.6)
        axes.plot(points, [i] * len(points), ".", color="black", markersize=4)
        axes.annotate(f"{middle:.2f}", (max(points), i), (5, -4), textcoords="offset points")
    axes.set_yticks(range(len(profiles)), [p.what for p in profiles])
    axes.invert_yaxis()
    axes.axvline(1, color="grey", linewidth=0.8, zorder=0)
    axes.set_xlabel("times the speed of stock vLLM (dots: pairs of runs)")
    model = MODEL if profiles[0] in CPU else "random weights"
    _title(axes, "Speed of h2o over stock vLLM", f"{model}, budget 20 %, {rows[-1]['machine']}")
    save(figure, target)


def draw_goodput(path: Path, target: Path) -> None:
    """Write ``target``.png and .svg: requests in time against requests sent, a line for each side.

    Args:
        path: the CSV of benchmarks.throughput.serve.
        target: without a suffix.

    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "serve"
    from matplotlib import pyplot

    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["machine"]]
    last = rows[-1]
    rows = [row for row in rows if row["run"] == last["run"]]
    figure, axes = pyplot.subplots(figsize=(6.4, 4))
    for side, color in zip(dict.fromkeys(row["side"] for row in rows), COLORS, strict=False):
        mine = sorted((float(r["rate"]), float(r["goodput"])) for r in rows if r["side"] == side)
        axes.plot(*zip(*mine, strict=True), "o-", color=color, label=side, markersize=4)
    most = max(float(row["rate"]) for row in rows)
    axes.plot([0, most], [0, most], "--", color="grey", linewidth=0.8, label="all in time")
    axes.set_xlabel("requests sent per second")
    axes.set_ylabel("requests answered in time per second")
    limits = (
        f"In time: first token within {float(last['slo_ttft_ms']):.0f} ms, then "
        f"{float(last['slo_tpot_ms']):.0f} ms a token"
    )
    name = "SmolLM2-135M in float32" if last["model"] == "smollm2-float32" else last["model"]
    details = f"{limits}\n{name}, {last['machine']}"
    _title(axes, "Requests answered in time", details)
    axes.legend(frameon=False, fontsize=9)
    save(figure, target)


def _title(axes: Any, title: str, details: str) -> None:
    """Write a title, and below it what was measured on which machine."""
    below = "\n" * (1 + details.count("\n"))
    axes.set_title(f"{title} (higher is better){below}", fontsize=12, loc="left")
    axes.text(0, 1.02, details, fontsize=9, transform=axes.transAxes)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Any, target: Path) -> None:
    """Write a figure of matplotlib's as ``target``.png and .svg."""
    from matplotlib import pyplot

    # Neither names the tool and the day: the same figures give the same files.
    bare: dict[str, dict[str, None]] = {
        "png": {"Software": None},
        "svg": {"Creator": None, "Date": None},
    }
    for suffix, metadata in bare.items():
        path = target.with_suffix(f".{suffix}")
        figure.savefig(path, dpi=150, bbox_inches="tight", metadata=metadata)
    pyplot.close(figure)


def main(path: Path) -> None:
    """Draw the chart of one CSV beside it."""
    with path.open() as file:
        columns = next(csv.reader(file))
    (draw_goodput if "goodput" in columns else draw)(path, path.with_suffix(""))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
