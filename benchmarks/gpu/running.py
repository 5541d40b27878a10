# SPDX-License-Identifier: Apache-2.0
"""Run parts of the check, each in a process with a time limit, as long as they fit."""

from __future__ import annotations

import csv
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu.card import ROOT, Card
from benchmarks.gpu.course import Part
from benchmarks.gpu.report import Report, holds

DOES_NOT_HOLD = 3
"""Status of a process whose part ran to its end, and some of whose checks failed."""


@dataclass(frozen=True)
class Outcome:
    """Results of all parts.

    Args:
        failed: parts with a check that fails, that crash or that hang.
        not_run: parts that were not begun, or that the end of the time cut; with the reason.

    """

    failed: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)

    def table(self) -> str:
        """A line a part that fails or was not run."""
        lines = [*(f"FAIL {name}" for name in self.failed), *self.not_run]
        return "\n".join(lines)


def run_part(name: str, chosen: Iterable[Part], out: Path, card: Card, device: str) -> bool:
    """One part, here; whether all of it holds."""
    (part,) = (part for part in chosen if part.name == name)
    report = Report(card, out)
    report.run(part.name, lambda: part.action(report, torch.device(device)))
    return all(map(holds, report.checks))


def run_all(
    chosen: Sequence[Part], arguments: Sequence[str], out: Path, minutes: float, card: Card
) -> Outcome:
    """Each in a process; what fails and what is left out.

    Args:
        chosen: the parts, in their order.
        arguments: of this command, for the processes.
        out: folder of the CSVs, and of what engines say.
        minutes: a part that does not fit into what is left of them is not begun; when they are
            over, the one that runs is ended.
        card: the device.

    """
    end, outcome = time.monotonic() + 60 * minutes, Outcome()
    with tempfile.TemporaryDirectory() as models:  # made once, for all parts
        for part in chosen:
            left, before, fails = end - time.monotonic(), _num_failed(out), ""
            why = _reason(part, card, left)
            if not why:
                command = [sys.executable, "-m", "benchmarks.gpu", *arguments, "--part", part.name]
                environment = {**os.environ, "TMPDIR": models}
                status = ended(command, min(part.limit, left), environment)
                if status is None and left < part.limit:
                    why = f"cut after {left:.0f} s: the time is over"
                elif status is None:
                    fails = f"{part.name}: ended after {part.limit:.0f} seconds"
                elif status not in (0, DOES_NOT_HOLD):
                    fails = f"{part.name}: ended with status {status}"
            if fails:
                Report(card, out).add((fails, math.inf, 0.0))
            elif _num_failed(out) > before:
                fails = part.name
            if fails:
                outcome.failed.append(fails)
            if why:
                outcome.not_run.append(f"not run ({why}): {part.name}")
                print(outcome.not_run[-1], flush=True)
    return outcome


def ended(command: list[str], seconds: float, environment: dict[str, str]) -> int | None:
    """Status of a process; None where it had to be ended."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Whatever ends it, or this command: engines that it started, too.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _reason(part: Part, card: Card, left: float) -> str:
    """Why a part is not begun; empty where it is."""
    if not card.has(part.gigabytes):
        return f"needs a card of {part.gigabytes} GB"
    if part.seconds > left:
        return f"takes about {part.seconds:.0f} s, and {max(left, 0):.0f} s are left"
    return ""


def _num_failed(out: Path) -> int:
    """Checks that fail so far, those of parts that were cut, too."""
    path = out / "gpu-checks.csv"
    if not path.exists():
        return 0
    with path.open(newline="") as file:
        return sum(row["holds"] == "0" for row in csv.DictReader(file))
