# SPDX-License-Identifier: Apache-2.0
"""Draw the steps of engines as bars over a common time, in text."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from demo.generate import Step

BLOCKS = " ▁▂▃▄▅▆▇█"
HEIGHT = 3
"""Lines of a row of bars."""
CHARTS = (
    ("pages of the largest sequence", "largest"),
    ("sequences at once", "sequences"),
)
"""A title, and the field of a step that is drawn."""


def picture(runs: Sequence[tuple[str, Sequence[Step]]], width: int) -> str:
    """Draw each chart for each engine, to one scale.

    Args:
        runs: name and steps of each engine.
        width: columns of the terminal.

    """
    label = max(len(name) for name, _ in runs) + 2
    columns = max(width - label - 6, 10)
    end = max(steps[-1].seconds for _, steps in runs)
    lines = []
    for title, field in CHARTS:
        top = max(map(attrgetter(field), (step for _, steps in runs for step in steps)))
        lines += ["", f"{title}, over {end:.0f} seconds"]
        for name, steps in runs:
            drawn = bars(sampled(steps, field, end, columns), top)
            most = max(map(attrgetter(field), steps))
            names = [*[""] * (HEIGHT - 1), name]
            lines += [f"{left:{label}}{row}" for left, row in zip(names, drawn, strict=True)]
            lines[-1] += f" {most}" if drawn[-1].rstrip() else ""
    return "\n".join(line.rstrip() for line in lines)


def sampled(steps: Sequence[Step], field: str, end: float, columns: int) -> list[float]:
    """Return the field in the middle of each column; 0 after the last step.

    Args:
        steps: steps of an engine.
        field: field of a step.
        end: seconds of all columns together.
        columns: number of values.

    """
    found = []
    for column in range(columns):
        at = (column + 0.5) * end / columns
        after = next((step for step in steps if step.seconds >= at), None)
        found.append(float(getattr(after, field)) if after else 0.0)
    return found


def bars(values: Sequence[float], top: float, height: int = HEIGHT) -> list[str]:
    """Draw values as columns, in eighths of a line.

    Args:
        values: one for each column.
        top: value that fills all lines.
        height: number of lines.

    Returns:
        The lines, from top to bottom.

    """
    eighths = [round(8 * height * value / top) if top else 0 for value in values]
    return [
        "".join(BLOCKS[min(max(filled - 8 * below, 0), 8)] for filled in eighths)
        for below in reversed(range(height))
    ]
