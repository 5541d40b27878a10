# SPDX-License-Identifier: Apache-2.0
"""Checks and figures as they come: printed with what was predicted, and kept in CSVs."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from triton.errors import TritonError

from benchmarks.gpu import kernels, latency, mlp, speed
from benchmarks.gpu.card import Card
from benchmarks.gpu.engines import ROOT, Check
from benchmarks.gpu.expected import of_kernels, of_mlp, of_profile
from benchmarks.record import append_rows
from benchmarks.throughput.profiles import GPU, QUICK, Profile
from benchmarks.throughput.runs import ratio_of
from vllm_h2o.kernels.triton.kernels import PromptAttention

BROKEN = (
    RuntimeError, ValueError, AssertionError, AttributeError, TypeError, LookupError, ImportError,
    ArithmeticError, OSError, TritonError,
)  # fmt: skip
"""Errors of a device, a build of vLLM or a kernel; whatever else ends a part is found by the
status of its process."""
PROFILES: Mapping[str, Profile] = {profile.id: profile for profile in (*GPU, *QUICK)}


@dataclass
class Report:
    """Checks as they come, one by one, and their table.

    Args:
        card: the device.
        out: folder of the CSVs.

    """

    card: Card
    out: Path
    checks: list[Check] = field(default_factory=list)

    def run(self, what: str, action: Callable[[], Iterable[Check]]) -> None:
        """Add the checks of an action; one that raises is a check that fails."""
        try:
            for check in action():
                self.add(check)
        except BROKEN as error:
            traceback.print_exc()
            self.add((f"{what}: {type(error).__name__}", math.inf, 0.0))

    def add(self, check: Check) -> None:
        """One check: printed, and kept."""
        self.checks.append(check)
        print(line(check), flush=True)
        what, figure, allowed = check
        row: dict[str, object]
        row = {"machine": self.card.name, "torch": torch.__version__, "what": what}
        row |= {"figure": figure, "at_most": allowed, "holds": int(holds(check))}
        append_rows(self.out / "gpu-checks.csv", [row])

    def speed(
        self, size: kernels.Size, device: torch.device, attention: PromptAttention | None
    ) -> Iterator[Check]:
        """Figures of one size, printed and kept; nothing is asked of them here."""
        figures = speed.speed(size, device, attention)
        predicted = of_kernels(self.card, size)
        self._keep("gpu-kernels.csv", vars(size), figures, predicted, speed.PREDICTED)
        self._show("", figures, predicted)
        yield from ()

    def mlp(self, layer: mlp.Layer, device: torch.device) -> Iterator[Check]:
        """Figures of a ReLU model's MLP, printed and kept; nothing is asked of them here."""
        for tokens, figures in mlp.speed(layer, self.card.half, device, speed.seconds):
            predicted = of_mlp(self.card, layer, tokens)
            size = {**layer._asdict(), "tokens": tokens}
            self._keep("gpu-mlp.csv", size, figures, predicted, figures)
            self._show(f"MLP, {tokens} tokens: ", figures, predicted)
        yield from ()

    def _keep(
        self,
        file: str,
        what: Mapping[str, object],
        figures: Mapping[str, float],
        predicted: Mapping[str, float],
        names: Iterable[str],
    ) -> None:
        """Append a row of figures; those with these names beside their predictions."""
        row = {"machine": self.card.name, "torch": torch.__version__, **what, **figures}
        row |= {f"{name}_predicted": predicted.get(name, math.nan) for name in names}
        append_rows(self.out / file, [row])

    def latency(self, profile: Profile, requests_per_s: float, small: bool) -> Iterator[Check]:
        """Latencies of each side, printed and kept; every request must be answered."""
        predicted = of_profile(self.card, profile)
        for name, figures in latency.measure(profile, requests_per_s, self.card.half, small):
            row: dict[str, object]
            row = {"machine": self.card.name, "vllm": version("vllm"), "profile": profile.id}
            row |= {"side": name, "requests_per_s": requests_per_s, **figures}
            append_rows(self.out / "gpu-latency.csv", [row])
            step = predicted.get((name, "step_ms"), math.nan)
            self._show(f"{profile.id}, {name}: ", figures, {"itl_p50_ms": step})
            missing = profile.num_prompts - figures["completed"]
            yield f"latency: {profile.id}, {name}: requests that were not answered", missing, 0.0

    def throughput(self, profile: Profile, small: bool) -> Iterator[Check]:
        """One pair of a profile of benchmarks.throughput, which prints a table of its own."""
        command = [sys.executable, "-m", "benchmarks.throughput", "--pairs", "1"]
        command += ["--out", str(self.out), "--only", profile.id]
        command += ["--quick"] if small else ["--device", "gpu"]
        done = subprocess.run(command, cwd=ROOT)
        yield f"throughput: {profile.id}: exit status", float(done.returncode), 0.0
        if done.returncode == 0:
            self._show_profile(profile, "quick" if small else "gpu")

    def _show_profile(self, profile: Profile, device: str) -> None:
        """Print the rows that the bench has just appended."""
        with (self.out / f"throughput-{device}.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["profile"] == profile.id]
        last, predicted = rows[-len(profile.sides) :], of_profile(self.card, profile)
        ratio = {"ratio": ratio_of(profile, *last[:2])}
        self._show(f"{profile.id}: ", ratio, {"ratio": predicted.get(("", "ratio"), math.nan)})
        for row in last:
            side = row["side"]
            of_side = {name: value for (whose, name), value in predicted.items() if whose == side}
            names = ("output_tokens_per_s", "step_ms", "mean_sequences")
            self._show(f"{profile.id}, {side}: ", {n: float(row[n]) for n in names}, of_side)
            moved, step_ms = of_side.get("step_GB"), float(row["step_ms"])
            if moved and step_ms:
                rate = moved / step_ms  # GB a millisecond
                print(f"  a step moves {moved:.3g} GB (predicted), here {rate:.3g} TB/s")

    @staticmethod
    def _show(label: str, figures: Mapping[str, float], predicted: Mapping[str, float]) -> None:
        """Print figures, each beside its prediction where there is one."""
        for name, value in figures.items():
            guess = predicted.get(name, math.nan)
            beside = "" if math.isnan(guess) else f"  (predicted {guess:.3g})"
            print(f"  {label}{name} {value:.4g}{beside}", flush=True)


def holds(check: Check) -> bool:
    """Whether a figure is no more than it may be; NaN never is."""
    return check[1] <= check[2]


def line(check: Check) -> str:
    """One line of the table."""
    what, figure, allowed = check
    return f"{'ok  ' if holds(check) else 'FAIL'} {figure:9.3g} (at most {allowed:.3g})  {what}"
