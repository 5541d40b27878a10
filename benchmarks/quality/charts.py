# SPDX-License-Identifier: Apache-2.0
"""Measure the figures of the charts, and draw them: ``make bench-quality``.

Two parts run at a time, each on a core of its own. A row is in its file as soon as it is there,
after those of earlier runs, and of equal ones the chart shows the last.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

from benchmarks.record import cores
from benchmarks.throughput.runs import ROOT

LATER = "h2o2", "h2o2 reconstruction", "h2o", "streaming"
NOW = *LATER, "snapkv", "h2o2 window"
PROSE = *LATER, "h2o2 window", "h2o mean_squares merge", "h2o mean_squares", "local"
Part = tuple[str, str, tuple[str, ...], tuple[str, ...]]
PARTS: tuple[Part, ...] = (
    ("quality_facts.csv", "facts-now", ("0.1", "0.2", "0.3"), NOW),
    ("quality.csv", "1k", (), PROSE),
    ("quality_facts.csv", "facts-later", ("0.1", "0.2", "0.3"), LATER),
    ("quality_facts.csv", "facts-now-anew", (), LATER[:1]),
    ("quality_facts.csv", "facts-instructed", (), LATER[:1]),
)
"""Longest first: a file, a plan, budgets (none: the plan's) and policies."""


def run(part: Part, folder: Path, core: int) -> float:
    """Measure a part on a core; the minutes that it took."""
    file, plan, shares, policies = part
    command = ["taskset", "-c", str(core), sys.executable, "-m", "benchmarks.quality"]
    command += ["--dtype", "float32", "--only", plan]
    command += ["--csv", str(folder / file), "--policies", *policies]
    command += ["--shares", *shares] if shares else []
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    with (folder / f"{plan}.log").open("w") as log:
        everything = {**os.environ, **own}
        subprocess.run(command, cwd=ROOT, env=everything, stdout=log, stderr=log, check=True)
    return (time.monotonic() - begun) / 60


def main() -> None:
    """Measure all parts, or those that are named."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.charts", description=__doc__
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--only", nargs="+", choices=[part[1] for part in PARTS])
    args = parser.parse_args()
    free: Queue[int] = Queue()
    for core in cores()[:2]:
        free.put(core)

    def measured(part: Part) -> None:
        core = free.get()
        try:
            print(f"{part[1]}: {run(part, args.folder.resolve(), core):.1f} min", flush=True)
        finally:
            free.put(core)

    begun = time.monotonic()
    asked = [part for part in PARTS if args.only is None or part[1] in args.only]
    with ThreadPoolExecutor(free.qsize()) as pool:
        list(pool.map(measured, asked))
    print(f"all: {(time.monotonic() - begun) / 60:.1f} min")


if __name__ == "__main__":
    main()
