"""The figures as a chart."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STYLES = {
    "h2o": ("#1f77b4", "o"),
    "h2o_mean": ("#d62728", "s"),
    "streaming": ("#2ca02c", "^"),
    "random": ("#9467bd", "v"),
    "local": ("#8c564b", "x"),
}


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """NLL above the full cache's, and pass keys found, against the budget.

    Args:
        rows: of one machine, model and length.
        path: of the image.

    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "quality"
    asked = any(row["passkey"] not in ("", None) for row in rows)
    figure, panels = pyplot.subplots(1, 2 if asked else 1, figsize=(9 if asked else 5, 3.4))
    left, right = panels if asked else (panels, None)
    for policy, (color, marker) in STYLES.items():
        mine = sorted((float(r["share"]), r) for r in rows if r["policy"] == policy)
        if not mine:
            continue
        shares = [100 * share for share, _ in mine]
        style = {"color": color, "marker": marker, "label": policy}
        left.plot(shares, [float(r["nll_above_full"]) for _, r in mine], **style)
        if right is not None:
            right.plot(shares, [100 * float(r["passkey"]) for _, r in mine], **style)
    first = rows[0]
    left.set_ylabel("nats per token above the full cache")
    left.set_yscale("log")
    if right is not None:
        right.set_ylabel("pass keys found, %")
    for axes in figure.axes:
        axes.set_xlabel("budget, % of the text")
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.suptitle(
        f"{first['model']}, {first['windows']} windows of {first['length']} tokens"
        + (f", {first['passkeys']} pass keys" if asked else ""),
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(path, metadata={"Creator": None, "Date": None})


if __name__ == "__main__":
    with open(sys.argv[1], newline="") as file:
        draw(list(csv.DictReader(file)), Path(sys.argv[2]))
