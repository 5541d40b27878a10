# SPDX-License-Identifier: Apache-2.0
"""Scores and splits compared in simulation: ``python -m research.simulation.search``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.quality import tasks
from benchmarks.quality.llama import Llama
from benchmarks.quality.plans import AFTER, SHARES_AFTER, slots
from benchmarks.quality.tables import print_table, record, row
from benchmarks.quality.tasks import Task
from benchmarks.smollm2 import model_dir
from research.simulation.simulate import Context, teacher_forced_nll
from research.simulation.variants import BUILT, CANDIDATES, Variant

NAMES = ("moby_dick", "union_1850s", "union_1990s")
PROSE_SHARES, CANDIDATE_SHARES = (0.05, 0.1), (0.2, 0.3)


def prose_rows(
    by: str, model: Llama, task: Task, variants: Sequence[Variant], shares: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """Nats above the full cache's, over the tokens behind the prompt."""
    ids, prompt = torch.cat([task.context, task.tail], 1), task.context.shape[1]
    anything = torch.zeros_like(task.tail)

    def nats(variant: Variant | None, capacity: int) -> torch.Tensor:
        torch.manual_seed(0)
        return teacher_forced_nll(model, ids, prompt, variant, capacity)[:, prompt - 1 :]

    full = nats(None, 0)
    figures = task.figures(full, anything, 0)
    yield row(by, task, "full", 1.0, task.length, figures, figures)
    for variant in variants:
        for share in shares:
            kept = slots(share, task.length)
            both = (nats(variant, kept), full)
            ours, theirs = (task.figures(x, anything, kept) for x in both)
            yield row(by, task, variant.name, share, kept, ours, theirs)


def recall_rows(
    by: str, model: Llama, task: Task, variants: Sequence[Variant]
) -> Iterator[dict[str, Any]]:
    """Answers found, of a context that is evicted from before the question is asked."""
    everything = Variant("full")
    context = Context(model, task.context, (everything, *variants))
    nothing = torch.zeros(task.tail.shape)

    def figures(variant: Variant, capacity: int) -> list[float]:
        torch.manual_seed(0)
        return task.figures(nothing, context.hits(task.tail, variant, capacity), capacity)

    full = figures(everything, task.length + task.tail.shape[1])
    yield row(by, task, "full", 1.0, task.length, full, full)
    for variant in variants:
        for share in SHARES_AFTER if variant in BUILT else CANDIDATE_SHARES:
            kept = slots(share, task.length)
            yield row(by, task, variant.name, share, kept, figures(variant, kept), full)


def main() -> None:
    """Compare, print, and append to the CSV."""
    parser = argparse.ArgumentParser(
        prog="python -m research.simulation.search", description=__doc__
    )
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    parser.add_argument("--built", action="store_true", help="only what the engine has, too")
    parser.add_argument("--variants", nargs="+", help="only these, by name")
    parser.add_argument("--only", nargs="+", choices=("passkey", "pairs", "prose"))
    parser.add_argument("--seed", type=int, default=0, help="of other pass keys and codes")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = model_dir("float32")
    model, tokenizer = Llama(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    by = f"simulation, torch {version('torch')}"
    every = BUILT if args.built else (*BUILT, *CANDIDATES)
    every = tuple(v for v in every if not args.variants or v.name in args.variants)
    passkey, pairs = (make(tokenizer, seed=args.seed) for make in AFTER[1:])
    parts = {
        "passkey": lambda: recall_rows(by, model, passkey, every),
        "pairs": lambda: recall_rows(by, model, pairs, every),
        "prose": lambda: prose_rows(
            by, model, tasks.prose(tokenizer, NAMES, 2, 1024, 768), every, PROSE_SHARES
        ),
    }
    rows = [record(found, args.csv) for name in args.only or parts for found in parts[name]()]
    print_table(rows)


if __name__ == "__main__":
    main()
