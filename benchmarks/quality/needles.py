# SPDX-License-Identifier: Apache-2.0
"""Draw where in a prompt facts are found: ``python -m benchmarks.quality.needles CSV OUT.svg``.

A square for each length of the prompt and fifth of it, a panel for each policy. Questions are at
the prompt's end, and the budget is a fifth of its tokens.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.facts import depths
from benchmarks.quality.phrasings import CONFIRMATION
from benchmarks.quality.plans import NEEDLES

TASK, SHARE, PARTS = "asked_now", 0.2, 5
COLORS = "#b2182b", "#fddbc7", "#2166ac"
"""Colours of none, of half, and of all."""


def found(rows: Sequence[Mapping[str, Any]], policy: str, length: int) -> list[float] | None:
    """Shares of facts that are found, by fifths of the prompt from its beginning.

    Args:
        rows: of one model; of equal ones the last counts.
        policy: the name in rows.
        length: of prompts, in tokens.

    Returns:
        None: it was not measured.

    """
    share = 1.0 if policy == "full" else SHARE
    asked = (TASK, str(length), policy, share)
    mine = [
        row
        for row in rows
        if (row["task"], row["length"], row["policy"], float(row["share"])) == asked
    ]
    if not mine:
        return None
    hits = [float(hit) for hit in mine[-1]["each"].split()]
    at = [int(depth * PARTS) for depth in depths(CONFIRMATION, len(hits))]
    each = [[hit for hit, part in zip(hits, at, strict=True) if part == i] for i in range(PARTS)]
    return [sum(part) / len(part) for part in each]


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A panel for the full cache and each policy: depth from top to bottom, length to the right.

    Args:
        rows: of one model.
        path: of the image.

    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "needles"
    from matplotlib import pyplot
    from matplotlib.colors import LinearSegmentedColormap

    policies = ("full", *NEEDLES)
    known = sorted({int(row["length"]) for row in rows if row["task"] == TASK})
    each = {n: [found(rows, policy, n) for policy in policies] for n in known}
    whole = {n: [part for part in parts if part] for n, parts in each.items() if all(parts)}
    figure, axes = pyplot.subplots(
        1, len(policies), figsize=(2.3 * len(policies), 2.9), squeeze=False, sharey=True
    )
    colors = LinearSegmentedColormap.from_list("found", COLORS)
    for i, (axis, policy) in enumerate(zip(axes[0], policies, strict=True)):
        table = [list(line) for line in zip(*(parts[i] for parts in whole.values()), strict=True)]
        axis.imshow(table, cmap=colors, vmin=0, vmax=1, aspect="auto")
        for y, line in enumerate(table):
            for x, value in enumerate(line):
                color = "black" if 0.3 < value < 0.7 else "white"
                axis.text(x, y, f"{100 * value:.0f}", ha="center", va="center", color=color)
        axis.set_title("full cache" if policy == "full" else policy, fontsize=10)
        axis.set_xticks(range(len(whole)), [f"{length:,}" for length in whole], fontsize=8)
        axis.set_yticks(range(PARTS), ["first fifth", "", "middle", "", "last fifth"], fontsize=8)
    figure.supxlabel("tokens of the prompt", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Creator": None, "Date": None})


def main() -> None:
    """Read a CSV file and draw."""
    table, out = map(Path, sys.argv[1:])
    draw(list(csv.DictReader(table.read_text().splitlines())), out)


if __name__ == "__main__":
    main()
