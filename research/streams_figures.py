# SPDX-License-Identifier: Apache-2.0
"""Draw the chart and the table of ``research.streams``: ``python -m research.streams_figures``.

A part of a text far from its beginning is compared with the same part in a request that begins
shortly before it, because centuries of English do not cost the same.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.throughput.chart import save

CSV = Path(__file__).parent / "results/streams.csv"
"""``h2o, sums kept`` is ``h2o`` as it was before a renumbering made sums fade."""
COLORS = {
    "streaming": "#2a6f97",
    "h2o": "#c1121f",
    "h2o, sums kept": "#7b2d8b",
    "h2o mean": "#e09f3e",
    "local": "#6a994e",
    "full": "black",
    "streaming, original positions": "#89b7d3",
    "h2o, original positions": "#eb9aa0",
}
STABLE = 0.05
"""Nats by which a part far into a text may cost more."""
SHORTEST, SHARE = 2048, 16
"""Tokens of a point in the chart, at least, and by which part of what is read they grow."""


@dataclass(frozen=True)
class Part:
    """A row of the CSV.

    Args:
        start: where in the text it begins.
        end: and ends.
        nll: nats per token.
        speed: tokens per second.
        memory: MiB of the process, the most so far.
        renumber_ms: milliseconds in which the request was renumbered; None: not measured.

    """

    start: int
    end: int
    nll: float
    speed: float
    memory: int
    renumber_ms: float | None


@dataclass(frozen=True)
class Run:
    """One text, read by one policy.

    Args:
        policy: its name in the tables.
        parts: in their order.
        pairs: of those that were read afresh, too: where they end, and what they cost more.

    """

    policy: str
    parts: list[Part]
    pairs: list[tuple[int, float]]

    @property
    def rolls(self) -> bool:
        """Whether its positions do."""
        return self.policy != "full" and "original" not in self.policy

    @property
    def far(self) -> list[tuple[int, float]]:
        """Pairs in the second half of what was read."""
        return [pair for pair in self.pairs if 2 * pair[0] > self.parts[-1].end]

    @property
    def drift(self) -> tuple[float, float | None]:
        """Mean of what those pairs cost more, and its standard error; None: of one."""
        more = [delta for _, delta in self.far]
        error = statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else None
        return statistics.mean(more), error


def runs(path: Path = CSV) -> list[Run]:
    """All of a CSV, the longest of each policy last."""
    texts: dict[tuple[str, int], list[Part]] = {}
    afresh: dict[str, list[Part]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            part = Part(
                int(row["start"]),
                int(row["end"]),
                float(row["nll"]),
                float(row["tokens_per_s"]),
                int(row["peak_rss_mib"]),
                float(row["renumber_ms"]) if row["renumber_ms"] else None,
            )
            if int(row["read_from"]):
                afresh.setdefault(row["policy"], []).append(part)
            else:
                texts.setdefault((row["policy"], int(row["tokens"])), []).append(part)
    return [
        Run(policy, parts, list(_pairs(parts, afresh.get(policy.split(",")[0], []))))
        for (policy, _), parts in sorted(texts.items(), key=lambda item: item[0][1])
    ]


def _pairs(parts: list[Part], afresh: list[Part]) -> Iterator[tuple[int, float]]:
    for part in parts:
        within = [one for one in afresh if part.start <= one.start and one.end <= part.end]
        num_within = sum(one.end - one.start for one in within)
        # A text's last token is followed by none, so it is judged in a longer text alone.
        if num_within >= part.end - part.start - 1:
            alone = sum(one.nll * (one.end - one.start) for one in within)
            yield part.end, part.nll - alone / num_within


def _smooth(parts: list[Part]) -> Iterator[tuple[int, float]]:
    """Where parts end, and nats of them: short ones together."""
    nats, begin = 0.0, parts[0].start
    for part in parts:
        nats += part.nll * (part.end - part.start)
        if part.end - begin >= max(SHORTEST, part.end // SHARE) or part is parts[-1]:
            yield part.end, nats / (part.end - begin)
            nats, begin = 0.0, part.end


def table() -> str:
    """Format the cost of tokens by distance, for texts that were also read afresh."""
    lines = [
        "| policy | tokens read | parts compared | nats per token, far | afresh | difference "
        "| tokens/s | MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for run in (run for run in runs() if run.far):
        ends = {end for end, _ in run.far}
        far = statistics.mean(part.nll for part in run.parts if part.end in ends)
        mean, error = run.drift
        known = "" if error is None else f" ± {error:.3f}"
        size = run.parts[0].end
        lines.append(
            f"| {run.policy} | {run.parts[-1].end:,} | {len(ends)} x {size:,} | {far:.3f} "
            f"| {far - mean:.3f} | {mean:+.3f}{known} "
            f"| {statistics.median(part.speed for part in run.parts):.0f} "
            f"| {run.parts[0].memory:,} to {run.parts[-1].memory:,} |"
        )
    return "\n".join(lines) + "\n"


def draw(path: Path, target: Path) -> None:
    """Write ``target``.png and .svg: nats by distance, and what a part costs more far away.

    Args:
        path: the CSV.
        target: without a suffix.

    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "streams"
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure, (costs, drifts) = pyplot.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2))
    every = runs(path)
    longest = {run.policy: run for run in every}
    for policy, color in COLORS.items():
        if policy not in longest:
            continue
        run = longest[policy]
        style = "-" if run.rolls else "--"
        ends, nats = zip(*_smooth(run.parts), strict=True)
        costs.plot(ends, nats, style, color=color, label=policy, linewidth=1.4)
        pairs = sorted(pair for run in every if run.policy == policy for pair in run.pairs)
        if pairs:
            drifts.plot(*zip(*pairs, strict=True), "o", color=color, markersize=3)
    drifts.axhspan(-STABLE, STABLE, color="grey", alpha=0.15, linewidth=0)
    drifts.axhline(0, color="grey", linewidth=0.8)
    drifts.set_ylabel("nats per token more than read afresh")
    drifts.set_ylim(-0.12, 0.12)
    drifts.set_xlim(2**15, 2 * max(part.end for run in every for part in run.parts))
    costs.set_ylabel("nats per token")
    costs.set_ylim(2.8, 4.8)
    costs.axvline(8192, color="grey", linewidth=0.8, linestyle=":")
    costs.annotate("trained to 8,192", (8192, 2.85), (4, 0), textcoords="offset points", fontsize=8)
    costs.legend(frameon=False, fontsize=8)
    for axes in (costs, drifts):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens / 1024:.0f}k"))
        axes.set_xlabel("tokens read")
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, target)


if __name__ == "__main__":
    draw(CSV, CSV.with_suffix(""))
    print(table(), end="")
