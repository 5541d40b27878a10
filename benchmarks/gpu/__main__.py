# SPDX-License-Identifier: Apache-2.0
"""Run all checks for a machine with a GPU in one command; a table comes last.

Usage::

    python -m benchmarks.gpu [--minutes 8] [--all] [--small] [--parts engines kernels graphs ...]

Each part runs in a process of its own, within a time of its own: one that crashes, hangs or poisons
the device fails alone, and what was found before is in the CSVs. A part that does not fit into the
time left, or on the device, is named as not run, and fails nothing.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

KINDS = ("kernels", "engines", "graphs", "throughput", "speed", "latency")
"""Kinds of the parts in :mod:`benchmarks.gpu.course`, which needs what may be missing."""
RESULTS = Path(__file__).parents[1] / "results"


def missing() -> str:
    """Say in one line what this Python lacks and what to do; empty: it has all."""
    lacks = [name for name in ("torch", "triton", "vllm") if find_spec(name) is None]
    if lacks:
        return (
            f"gpu-check: {sys.executable} has no {' and no '.join(lacks)}. Install vLLM 0.32 or "
            "0.33 for CUDA there, or name another Python: make gpu-check PYTHON=/path/to/python"
        )
    try:
        version("vllm-h2o")
    except PackageNotFoundError:
        return (
            f"gpu-check: {sys.executable} has vLLM without this plugin. Install it there: "
            f"{sys.executable} -m pip install --no-deps ."
        )
    return ""


def main() -> None:
    """Run the parts; exit with 1 when a check fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, interpreted")
    parser.add_argument("--all", action="store_true", help="every engine and profile")
    parser.add_argument("--minutes", type=float, default=8.0, help="end then (8)")
    parser.add_argument("--parts", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSVs")
    parser.add_argument("--part", help="run this one alone, in this process")
    parser.add_argument("--card", type=json.loads, help="the device, where it is known: JSON")
    args = parser.parse_args()
    if why := missing():
        sys.exit(why)
    import torch

    if not args.small and not torch.cuda.is_available():
        sys.exit(
            f"gpu-check: PyTorch {torch.__version__} finds no GPU. Run it on a machine with one."
        )
    from benchmarks.gpu.card import Card, processor
    from benchmarks.gpu.course import parts
    from benchmarks.gpu.running import DOES_NOT_HOLD, run_all, run_part

    asks = Card.ask if args.card is None else partial(Card, **args.card)
    card = processor() if args.small else asks()
    args.out.mkdir(parents=True, exist_ok=True)
    every = parts(args.small, args.all, card)
    if args.part:
        device = "cpu" if args.small else "cuda"
        sys.exit(0 if run_part(args.part, every, args.out, card, device) else DOES_NOT_HOLD)
    chosen = [part for part in every if part.kind in args.parts]
    arguments = [flag for flag, on in (("--small", args.small), ("--all", args.all)) if on]
    arguments += ["--out", str(args.out)]
    arguments += [] if args.small else ["--card", json.dumps(asdict(card))]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    outcome = run_all(chosen, arguments, args.out, args.minutes, card)
    print(f"\n{outcome.table()}")
    print(
        f"{len(outcome.failed)} parts fail, {len(outcome.not_run)} were not run; each check is in "
        f"{args.out / 'gpu-checks.csv'}"
    )
    sys.exit(1 if outcome.failed else 0)


if __name__ == "__main__":
    main()
