# SPDX-License-Identifier: Apache-2.0
"""P7: pressure, stock vLLM and prompt_end in turn, in pools of several sizes.

Usage::

    python -m benchmarks.throughput.pressure [--quick] [--only P7-4 P7-8] [--sides pressure]
        [--rounds 1] [--lengths 512 1024] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.record import append_rows, machine_name
from benchmarks.throughput.profiles import QUICK_PRESSURE, Profile, under_pressure
from benchmarks.throughput.runs import ROOT, row_of, run

RESULTS = ROOT / "benchmarks" / "results"


def measure(
    profile: Profile, number: int, machine: str, log: Path, csv: Path, compiled: bool
) -> list[dict[str, Any]]:
    """A row for each side of a profile; in the file as soon as it is there."""
    rows = []
    for side in profile.sides:
        figures = run(profile, side, "cpu", log, compiled)
        own = {name: figures[name] for name in ("evicted_tokens", "pressure_packs")}
        own["torch_compile"] = int(compiled)
        own["digests"] = " ".join(figures["digests"])
        rows.append({**row_of(profile, side, figures, machine, number), **own})
        append_rows(csv, rows[-1:])
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format all runs as Markdown."""
    lines = [
        "| profile | side | tokens/s | at once | preempted | tokens evicted | packs |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['profile']} | {row['side']} | {row['output_tokens_per_s']:.1f} "
        f"| {row['mean_sequences']:.1f} | {row['preemptions']} | {row['evicted_tokens']} "
        f"| {row['pressure_packs']} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the profiles that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one tiny pool, for its functioning")
    parser.add_argument("--only", nargs="+", default=None, metavar="ID", help="profiles to run")
    parser.add_argument(
        "--sides", nargs="+", default=("pressure", "stock", "prompt_end"), metavar="WORD",
        help="of pressure, stock and prompt_end; all by default",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=1, help="runs of each side (1)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV")
    parser.add_argument(
        "--lengths", nargs=2, type=int, default=(512, 1024), metavar="TOKENS",
        help="of each prompt, and generated for it (512 1024)",
    )  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="with torch.compile, as users do")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    model = "smollm2" if args.dtype == "bfloat16" else f"smollm2-{args.dtype}"
    profiles = QUICK_PRESSURE if args.quick else under_pressure(tuple(args.lengths), model)
    chosen = [
        replace(p, sides=tuple(s for s in p.sides if any(word in s.name for word in args.sides)))
        for p in profiles
        if args.only is None or p.id in args.only
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    name = "pressure-quick" if args.quick else "pressure-cpu"
    csv, log = args.out / f"{name}.csv", args.out / f"{name}.log"
    machine = machine_name()
    print(machine)
    rows = []
    for number in range(args.rounds):
        for profile in chosen:
            rows += measure(profile, number, machine, log, csv, args.compile)
    print(table(rows))


if __name__ == "__main__":
    main()
