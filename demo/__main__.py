# SPDX-License-Identifier: Apache-2.0
"""Generate the same texts with stock vLLM and with H2O, in the same small pool: ``make demo``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from benchmarks.record import append_rows, machine_name
from benchmarks.smollm2 import MODEL, model_dir
from demo.bars import picture
from demo.generate import (
    BLOCK_SIZE,
    BUDGET,
    NUM_REQUESTS,
    OUTPUT_TOKENS,
    POOL_PAGES,
    Result,
    Step,
)

ROOT = Path(__file__).parents[1]
LOG = ROOT / "demo.log"

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # the in-process engine and torch would fight for threads
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


class EngineError(Exception):
    """An engine of the demo ended before its result."""


def lines_of(model: str, policy: str | None) -> Iterator[dict[str, Any]]:
    """Yield what an engine in a process of its own reports; what it says goes to the log.

    Raises:
        EngineError: when it ends with an error.

    """
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "demo.generate", model, "--report", str(writing)]
    command += ["--kv-policy", policy] if policy else []
    with LOG.open("a") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT},
            cwd=ROOT,
            stdout=log,
            stderr=log,
            pass_fds=[writing],
        )
    os.close(writing)
    try:
        with open(reading) as report:
            yield from map(json.loads, report)
        if process.wait():
            raise EngineError(f"the engine ended with status {process.returncode}")
    finally:
        process.terminate()
        process.wait()


def run_engine(model: str, policy: str | None, console: Console) -> tuple[Result, list[Step]]:
    """Run one engine with a progress bar. Returns its result and its steps."""
    columns = (
        TextColumn("{task.description:15}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("tokens  {task.fields[state]:>16}"),
    )
    name = f"--kv-policy {policy}" if policy else "stock vLLM"
    steps: list[Step] = []
    with Progress(*columns, console=console, expand=True) as progress:
        bar = progress.add_task(name, total=NUM_REQUESTS * OUTPUT_TOKENS, state="starting")
        for line in lines_of(model, policy):
            if "name" in line:
                result = Result(**line)
                progress.update(bar, state=f"done in {result.seconds:.0f} s")
                continue
            steps.append(Step(**line))
            state = f"{steps[-1].sequences} at once"
            progress.update(bar, completed=steps[-1].tokens, state=state)
    return result, steps


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
        ("preemptions (computed again)", "preemptions"),
    )
    for label, field in rows:
        table.add_row(label, *(str(getattr(result, field)) for result in (stock, ours)))
    table.add_row(
        "sequences at once, on average",
        *(f"{result.mean_sequences:.1f}" for result in (stock, ours)),
    )
    table.add_row(
        "output tokens per second", *(f"{r.tokens / r.seconds:.1f}" for r in (stock, ours))
    )
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
    """Convert the model if necessary, run both engines, and compare them."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    args = parser.parse_args()
    console = Console()
    model = str(model_dir("bfloat16"))
    LOG.unlink(missing_ok=True)
    console.print(
        f"Two engines answer the same {NUM_REQUESTS} prompts, one after the other, in the same "
        f"memory. vLLM's own output goes to {LOG.name}."
    )
    try:
        runs = [run_engine(model, policy, console) for policy in (None, "h2o")]
    except EngineError as error:
        console.print(*LOG.read_text().splitlines()[-15:], sep="\n", markup=False)
        sys.exit(f"{error}; its log is {LOG}")
    (stock, _), (ours, _) = runs
    if args.csv:
        append_rows(args.csv, csv_rows((stock, ours)))
    console.print()
    console.print(results_table(stock, ours))
    named = [(result.name, steps) for result, steps in runs]
    console.print(picture(named, console.width), highlight=False, markup=False)
    for result in (stock, ours):
        console.print(f"\n[bold]{result.name}[/bold] begins:\n{opening(result.text)}")


if __name__ == "__main__":
    main()
