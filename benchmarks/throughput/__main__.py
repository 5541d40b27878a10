# SPDX-License-Identifier: Apache-2.0
"""Stock vLLM and h2o in alternation, in one run: A B A B, medians of pairs, a CSV and a chart.

Usage::

    python -m benchmarks.throughput [--device cpu|gpu] [--quick] [--only P1 P4] [--pairs 2]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import append_rows, machine_name
from benchmarks.throughput.profiles import CPU, GPU, POLICIES, QUICK, Profile
from benchmarks.throughput.runs import ROOT, ratio_of, row_of, run

RESULTS = ROOT / "benchmarks" / "results"


def measure(
    profile: Profile, pairs: int, device: str, machine: str, log: Path, csv: Path
) -> dict[str, Any]:
    """All pairs of a profile; its summary."""
    ratios, ours, theirs = [], [], []
    for pair in range(pairs):
        rows = [
            row_of(profile, side, run(profile, side, device, log), machine, pair)
            for side in profile.sides
        ]
        append_rows(csv, rows)
        ratios.append(ratio_of(profile, *rows[:2]))
        ours.append(rows[0])
        theirs.append(rows[1])
        print(
            f"{profile.id:16} pair {pair}: {ratios[-1]:.2f}",
            *(
                f"\n  {r['side']}: {r['output_tokens_per_s']} tokens/s, {r['mean_sequences']} "
                f"sequences, {r['step_ms']} ms a step"
                for r in rows
            ),
            flush=True,
        )
    return {
        "profile": profile.id,
        "what": profile.what,
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "ours": statistics.median(row["output_tokens_per_s"] for row in ours),
        "theirs": statistics.median(row["output_tokens_per_s"] for row in theirs),
    }


def table(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Format all profiles as in the README."""
    lines = [
        "| profile | h2o / stock | spread | h2o, tokens/s | stock, tokens/s |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for s in summaries:
        lines.append(
            f"| {s['profile']}: {s['what']} | {s['ratio']:.2f} | {s['low']:.2f} to {s['high']:.2f} "
            f"| {s['ours']:.1f} | {s['theirs']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the profiles that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument(
        "--quick", action="store_true", help="one tiny profile, for its functioning"
    )
    parser.add_argument("--only", nargs="+", default=None, metavar="ID", help="profiles to run")
    parser.add_argument("--pairs", type=int, default=2, help="pairs of runs a profile (2)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV and the chart")
    args = parser.parse_args()
    usual = QUICK if args.quick else CPU if args.device == "cpu" else GPU
    known = {p.id: p for p in (*usual, *POLICIES)}
    chosen = [known[name] for name in args.only or (p.id for p in usual)]
    args.out.mkdir(parents=True, exist_ok=True)
    name = "throughput-quick" if args.quick else f"throughput-{args.device}"
    csv, log = args.out / f"{name}.csv", args.out / f"{name}.log"
    machine = machine_name() if args.device == "cpu" else _gpu_name()
    print(machine)
    summaries = [measure(p, args.pairs, args.device, machine, log, csv) for p in chosen]
    print(table(summaries))
    if args.quick:
        return
    try:
        from benchmarks.throughput.chart import draw
    except ImportError as error:
        print(f"no chart: {error}")
    else:
        draw(csv, args.out / name)


def _gpu_name() -> str:
    import torch

    return str(torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
