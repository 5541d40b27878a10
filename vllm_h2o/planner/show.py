# SPDX-License-Identifier: Apache-2.0
"""Show a plan as text for a terminal, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm_h2o.errors import UnsupportedError
from vllm_h2o.planner.capacity import Row, Workload

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_TITLES = ("", "tokens", "pages", "memory", "at once", "x stock", "and a prompt")


def memory_text(num_bytes: float) -> str:
    """Write bytes in the unit that leaves a number below 1024."""
    for unit in _UNITS[:-1]:
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} {_UNITS[-1]}"


def table(rows: Sequence[Row]) -> str:
    """Write one line a row; the first row is stock vLLM."""
    stock = rows[0].sequences
    lines: list[tuple[str, ...]] = [_TITLES]
    for row in rows:
        times = f"{row.sequences / stock:.2f}" if stock else "-"
        numbers = (row.slots, row.pages, memory_text(row.num_bytes), row.sequences, times)
        lines.append((row.label, *map(str, numbers), str(row.sequences_with_a_prompt)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        f"{line[0]:<{widths[0]}}"
        + "".join(f"  {cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in lines
    )


def bars(rows: Sequence[Row], columns: int) -> str:
    """Draw the sequences that fit as bars.

    Args:
        rows: stock vLLM first.
        columns: width of the terminal.

    """
    largest = max(row.sequences for row in rows) or 1
    label = max(len(row.label) for row in rows)
    room = max(columns - label - len(str(largest)) - 3, 10)
    return "\n".join(
        f"{row.label:<{label}} {'█' * round(room * row.sequences / largest)} {row.sequences}"
        for row in rows
    )


def notes(rows: Sequence[Row], work: Workload) -> str:
    """Explain the numbers, and name the engines that do not start."""
    peaks = {row.prompt_pages for row in rows}
    held = ", ".join(f"{row.label} {row.prompt_pages}" for row in rows)
    peak = f"{max(peaks)} pages" if len(peaks) == 1 else f"these pages: {held}"
    lines = [
        "tokens, pages, memory: held by one sequence past its prompt",
        f"at once: sequences of {work.max_model_len} tokens that fit, past their prompts",
        f"and a prompt: the same while one of them computes a prompt of {work.prompt_len} tokens, "
        f"which holds {peak}",
        f"stock vLLM will log a maximum concurrency of {rows[0].concurrency:.2f}x",
    ]
    lines += [
        f"{row.label} does not start: vLLM needs {row.start_pages} pages for one longest sequence, "
        f"and there are {row.pool.num_pages}"
        for row in rows
        if not row.starts
    ]
    if not all(row.starts for row in rows):
        lines.append("give more memory, or a smaller --max-model-len")
    return "\n".join(lines)


def save_plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write the bars as a picture, in the format of the file's suffix.

    Raises:
        UnsupportedError: without matplotlib, or for a suffix that it does not write.

    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            f"--plot {path}",
            "matplotlib is not installed",
            "the picture is drawn with it",
            "pip install matplotlib, or leave --plot out",
        ) from error
    figure = Figure(figsize=(7, 1.2 + 0.4 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    names = [row.label for row in rows]
    drawn = axes.barh(names, [row.sequences for row in rows], color="#4477aa")
    drawn.patches[0].set_color("#bbbbbb")
    axes.bar_label(drawn, padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("sequences at once")
    axes.set_title(title, fontsize=10, loc="left")
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise UnsupportedError(
            f"--plot {path}",
            str(error).splitlines()[0],
            "the suffix names the format of the picture",
            "use a name that ends in .png or .svg",
        ) from error
