"""Scores and splits compared in simulation: ``python -m benchmarks.quality.search``."""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.quality import tasks, texts
from benchmarks.quality.llama import Llama
from benchmarks.quality.simulate import Context, teacher_forced_nll
from benchmarks.quality.variants import BASELINES, CANDIDATES, Variant
from benchmarks.record import append_rows, machine_name
from demo.smollm2 import MODEL, model_dir

LENGTH, PROMPT = 1024, 256
NAMES = ("moby_dick", "union_1850s", "union_1990s")
WINDOWS = 2
NLL_SLOTS, RECALL_SLOTS = (52, 103), (205, 307)
"""5 and 10 per cent, 20 and 30 per cent of 1024."""
CONTEXTS = {"passkey": 24, "pairs": 8}
VARIANTS = (*BASELINES, *CANDIDATES)


def nll_rows(model: Llama, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Nats above the full cache's, over the tokens behind the prompt."""
    windows = [texts.windows(tokenizer, name, WINDOWS, LENGTH) for name in NAMES]
    ids = torch.cat(windows)
    full = teacher_forced_nll(model, ids, PROMPT, None)
    for variant in VARIANTS:
        for slots in NLL_SLOTS:
            torch.manual_seed(0)
            nll = teacher_forced_nll(model, ids, PROMPT, variant, slots)
            excess = (nll - full)[:, PROMPT:].mean(1)
            by_text = excess.view(len(NAMES), WINDOWS).mean(1).tolist()
            named = {name: round(x, 4) for name, x in zip(NAMES, by_text, strict=True)}
            yield {
                "measure": "nll above full",
                "variant": variant.name,
                "slots": slots,
                "mean": round(float(excess.mean()), 4),
                "std": round(float(excess.std()), 4),
                "count": len(excess),
                **named,
            }


def recall_rows(model: Llama, tokenizer: Tokenizer, name: str) -> Iterator[dict[str, Any]]:
    """Answers found, of a context that is evicted from before the question is asked."""
    task = {"passkey": tasks.passkey, "pairs": tasks.pairs}[name](tokenizer, CONTEXTS[name], LENGTH)
    everything = Variant("full")
    context = Context(model, task.context, (everything, *VARIANTS))
    enough = LENGTH + task.tail.shape[1]
    for variant in (everything, *VARIANTS):
        for slots in (enough,) if variant is everything else RECALL_SLOTS:
            torch.manual_seed(0)
            hits = context.hits(task.tail, variant, slots)
            found = [
                float(answer)
                for which in range(int(task.answers.max()) + 1)
                for answer in hits[:, task.answers == which].all(1)
            ]
            yield {
                "measure": name,
                "variant": variant.name,
                "slots": slots,
                "mean": round(statistics.fmean(found), 4),
                "std": round(statistics.stdev(found), 4),
                "count": len(found),
                **dict.fromkeys(NAMES, ""),
            }


def main() -> None:
    """Compare, print, and append to the CSV."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.search", description=__doc__
    )
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = model_dir("float32")
    model, tokenizer = Llama(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    same = {
        "machine": machine_name(),
        "torch": version("torch"),
        "model": MODEL,
        "length": LENGTH,
        "prompt": PROMPT,
    }
    for rows in (
        recall_rows(model, tokenizer, "passkey"),
        nll_rows(model, tokenizer),
        recall_rows(model, tokenizer, "pairs"),
    ):
        for row in rows:
            print(*(row[key] for key in ("measure", "variant", "slots", "mean", "std")), flush=True)
            if args.csv:
                append_rows(args.csv, [same | row])


if __name__ == "__main__":
    main()
