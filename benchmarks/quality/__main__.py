"""What a budget costs, measured in the engine: ``python -m benchmarks.quality``."""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.quality import tasks, texts
from benchmarks.quality.forced import Judged, judge
from benchmarks.quality.tables import print_table
from benchmarks.record import append_rows, machine_name
from demo.smollm2 import MODEL, model_dir

POLICIES = ("h2o", "h2o_mean", "streaming", "random", "local")
Text = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Args:
        policies: names.
        shares: budgets, as shares of ``length``.
        length: tokens of a window, and of a context that is asked about.
        prompt: tokens of a window that are its prompt.
        windows: windows of each text.
        names: texts.
        passkeys: contexts with a pass key.

    """

    policies: Sequence[str] = POLICIES
    shares: Sequence[float] = (0.05, 0.1, 0.2)
    length: int = 1024
    prompt: int = 256
    windows: int = 2
    names: Sequence[str] = texts.TEXTS
    passkeys: int = 12


QUICK = Plan(("h2o", "h2o_mean", "local", "random"), (0.125,), 384, 128, 2, texts.TEXTS[:2], 0)


@dataclass
class Bench:
    """The requests of a plan, and what comes of them.

    Args:
        plan: how much.
        model: folder.
        progress: show bars.

    """

    plan: Plan
    model: Path
    progress: bool = True
    windows: list[Text] = field(init=False)
    questions: list[Text] = field(init=False)
    answers: list[int] = field(init=False)

    def __post_init__(self) -> None:
        plan, tokenizer = self.plan, Tokenizer.from_file(str(self.model / "tokenizer.json"))
        self.windows = [
            (window[: plan.prompt], window[plan.prompt :])
            for name in plan.names
            for window in texts.windows(tokenizer, name, plan.windows, plan.length).tolist()
        ]
        self.questions, self.answers = [], []
        if plan.passkeys:
            task = tasks.passkey(tokenizer, plan.passkeys, plan.length)
            pairs = zip(task.context.tolist(), task.tail.tolist(), strict=True)
            self.questions, self.answers = list(pairs), task.answers.tolist()

    def judge(self, policy: str, slots: int | None) -> tuple[list[list[float]], list[bool]]:
        """Nats of every window's forced tokens but the first, and which pass keys were found.

        The first follows the prompt, from which nothing had been evicted while it was computed.
        """
        options = None if slots is None else {"budget": slots}
        requests = self.windows + self.questions
        longest = max(len(prompt) + len(forced) for prompt, forced in requests)
        judged = judge(str(self.model), policy, options, requests, longest, self.progress)
        count = len(self.windows)
        return [j.nll[1:] for j in judged[:count]], [self.found(j) for j in judged[count:]]

    def found(self, judged: Judged) -> bool:
        """Whether every token of the answer was the model's own choice."""
        return all(
            first for first, which in zip(judged.first, self.answers, strict=True) if which >= 0
        )

    def rows(self) -> Iterable[dict[str, Any]]:
        """One for each policy and budget; the full cache first."""
        full, found = self.judge("full", None)
        yield self._row("full", 1.0, self.plan.length, full, full, found)
        for share in self.plan.shares:
            slots = int(share * self.plan.length)
            for policy in self.plan.policies:
                nll, found = self.judge(policy, slots)
                yield self._row(policy, share, slots, nll, full, found)

    def _row(
        self,
        policy: str,
        share: float,
        slots: int,
        nll: list[list[float]],
        full: list[list[float]],
        found: list[bool],
    ) -> dict[str, Any]:
        plan = self.plan
        excess = [statistics.fmean(a) - statistics.fmean(b) for a, b in zip(nll, full, strict=True)]
        by_text = [
            statistics.fmean(excess[i * plan.windows : (i + 1) * plan.windows])
            for i in range(len(plan.names))
        ]
        return {
            "policy": policy,
            "share": share,
            "slots": slots,
            "nll": round(statistics.fmean(map(statistics.fmean, nll)), 4),
            "nll_above_full": round(statistics.fmean(excess), 4),
            "std_over_windows": round(statistics.stdev(excess), 4),
            "passkey": round(statistics.fmean(found), 3) if found else "",
            **{
                f"above_full_{name}": round(value, 4)
                for name, value in zip(plan.names, by_text, strict=True)
            },
        }


def main() -> None:
    """Measure, print the table, append to the CSV and draw the chart."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short texts, one budget, no chart")
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    parser.add_argument("--chart", type=Path, help="draw this SVG from the figures (matplotlib)")
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--shares", nargs="+", type=float, default=Plan.shares)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    plan = QUICK if args.quick else Plan(tuple(args.policies), tuple(args.shares))
    same = {
        "machine": machine_name(),
        "vllm": version("vllm"),
        "model": MODEL,
        "dtype": "float32",
        "length": plan.length,
        "prompt": plan.prompt,
        "windows": plan.windows * len(plan.names),
        "passkeys": plan.passkeys,
    }
    rows = []
    for row in Bench(plan, model_dir("float32")).rows():
        rows.append(same | row)
        if args.csv:
            append_rows(args.csv, rows[-1:])
        print_table(rows[-1:])
    print_table(rows)
    if args.chart:
        from benchmarks.quality.chart import draw

        draw(rows, args.chart)


if __name__ == "__main__":
    main()
