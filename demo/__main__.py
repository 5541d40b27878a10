# SPDX-License-Identifier: Apache-2.0
"""Generate the same texts with stock vLLM and with H2O, in the same small pool: ``make demo``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import append_rows, machine_name
from benchmarks.smollm2 import MODEL, model_dir
from demo.generate import (
    BLOCK_SIZE,
    BUDGET,
    NUM_REQUESTS,
    OUTPUT_TOKENS,
    POOL_PAGES,
    Result,
)

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # the in-process engine and torch would fight for threads
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def run_engine(model: str, policy: str | None, console: Console) -> Result:
    """Run one engine in a process of its own; its progress bar goes to this terminal."""
    console.print(
        f"[dim]starting {'vLLM with --kv-policy ' + policy if policy else 'stock vLLM'} …"
    )
    flags = ["--kv-policy", policy] if policy else []
    done = subprocess.run(
        [sys.executable, "-m", "demo.generate", model, *flags],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Result(**json.loads(done.stdout.strip().splitlines()[-1]))


def results_table(stock: Result, ours: Result) -> Table:
    """Compare pages, sequences and speed."""
    table = Table(
        title=f"{NUM_REQUESTS} requests of {OUTPUT_TOKENS} tokens, a pool of "
        f"{(POOL_PAGES - 1) * BLOCK_SIZE} tokens, budget {BUDGET}",
    )
    table.add_column("")
    for result in (stock, ours):
        table.add_column(result.name, justify="right")
    rows = (
        ("pages of one sequence, at most", "peak_pages_per_sequence"),
        ("pages in use, at most", "peak_pages"),
        ("preemptions", "preemptions"),
    )
    for label, field in rows:
        table.add_row(label, *(str(getattr(result, field)) for result in (stock, ours)))
    table.add_row(
        "sequences at once, on average",
        *(f"{result.mean_sequences:.1f}" for result in (stock, ours)),
    )
    table.add_row("output tokens/s", *(f"{r.tokens / r.seconds:.1f}" for r in (stock, ours)))
    return table


def csv_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Make one row per engine, with the machine and the demo's settings."""
    settings = {
        "machine": machine_name(),
        "vllm": version("vllm"),
        "torch": version("torch"),
        "model": MODEL,
        "dtype": "bfloat16",
        "requests": NUM_REQUESTS,
        "output_tokens": OUTPUT_TOKENS,
        "pool_pages": POOL_PAGES - 1,
        "block_size": BLOCK_SIZE,
        "budget": BUDGET,
    }
    rows = []
    for result in results:
        figures = dataclasses.asdict(result) | {
            "seconds": round(result.seconds, 2),
            "mean_sequences": round(result.mean_sequences, 2),
        }
        del figures["text"]
        rows.append(settings | figures)
    return rows


def opening(text: str, length: int = 500) -> str:
    """Return the first ``length`` characters, cut at a word."""
    return text.strip()[:length].rsplit(" ", 1)[0] + " …"


def main() -> None:
    """Convert the model if necessary, run both engines, print the table and both openings."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    args = parser.parse_args()
    console = Console()
    model = str(model_dir("bfloat16"))
    stock = run_engine(model, None, console)
    ours = run_engine(model, "h2o", console)
    if args.csv:
        append_rows(args.csv, csv_rows((stock, ours)))
    console.print()
    console.print(results_table(stock, ours))
    for result in (stock, ours):
        console.print(f"\n[bold]{result.name}[/bold] begins:\n{opening(result.text)}")


if __name__ == "__main__":
    main()
