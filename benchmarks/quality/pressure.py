# SPDX-License-Identifier: Apache-2.0
"""Measure what eviction costs under load: texts in one tight pool, each forced along its own words.

Usage::

    python -m benchmarks.quality.pressure [--lengths 256 256] [--csv FILE]

All texts are sent at once, as in P7 (benchmarks/throughput/pressure.py), in the same pools: other
requests' needs decide what is evicted, and when. A token's negative log-likelihood is judged after
everything that was evicted before it. The excess is over stock vLLM in a pool for all, by text.

Neither stock vLLM nor ``eviction=prompt_end`` keeps more where there is more room, so they do not
run in every pool: ``prompt_end`` in the tightest, stock vLLM in the largest.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.quality.forced import force, forced_engine
from benchmarks.quality.texts import TEXTS, windows
from benchmarks.record import append_rows, machine_name
from benchmarks.smollm2 import MODEL, model_dir
from benchmarks.throughput.models import MODELS
from benchmarks.throughput.profiles import Profile, Side, pressed
from benchmarks.throughput.runs import ENVIRONMENT, ON_CPU
from benchmarks.throughput.watch import watching

DTYPE, SHAPE = "float32", "smollm2-float32"
NUM_TEXTS, BUDGET = 32, 0.2
POOLS = (32, 16, 8, 4)
"""Whole sequences that a pool holds; for all first: stock vLLM there is the full cache."""


def texts(lengths: Sequence[int], count: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and what follows them: ``count`` windows, spread over all of ``TEXTS``.

    Args:
        lengths: tokens of a prompt, and of what is forced.
        count: a multiple of the number of texts.

    """
    tokenizer = Tokenizer.from_file(str(model_dir(DTYPE) / "tokenizer.json"))
    found = [windows(tokenizer, text, count // len(TEXTS), sum(lengths)) for text in TEXTS]
    cut = lengths[0]
    return [(row[:cut], row[cut:]) for part in found for row in part.tolist()]


def judged(
    profile: Profile, side: Side, load: Sequence[tuple[list[int], list[int]]]
) -> tuple[list[float], dict[str, float]]:
    """Mean nats a token of each text, and what the engine's steps were like."""
    policy = None if side.budget is None else "h2o"
    options = {"budget": side.budget, **side.options} if policy else None
    engine = forced_engine(
        str(model_dir(DTYPE)),
        policy,
        options,
        profile.max_model_len,
        DTYPE,
        block_size=profile.block_size,
        num_gpu_blocks_override=profile.num_blocks(side, MODELS[profile.model].bytes_per_slot),
        disable_log_stats=False,
    )
    with watching() as watch, engine as llm:
        found = force(llm, load, [None] * len(load), progress=False)
    return [statistics.fmean(text.nll) for text in found], watch.summary()


def row_of(
    profile: Profile, side: Side, nll: Sequence[float], full: Sequence[float], steps: dict[str, Any]
) -> dict[str, Any]:
    """One side in one pool; ``full`` is stock vLLM's in the pool for all, text by text."""
    excess = [ours - theirs for ours, theirs in zip(nll, full, strict=True)]
    return {
        "profile": profile.id,
        "side": side.name,
        "machine": machine_name(),
        "vllm": version("vllm"),
        "model": MODEL,
        "dtype": DTYPE,
        "input_len": profile.input_len,
        "forced": profile.output_len,
        "texts": len(nll),
        "budget": side.budget,
        "nll": round(statistics.fmean(nll), 4),
        "above_full": round(statistics.fmean(excess), 4),
        "standard_error": round(statistics.stdev(excess) / math.sqrt(len(excess)), 4),
        **{
            name: round(steps[name], 2)
            for name in ("mean_sequences", "preemptions", "evicted_tokens", "pressure_packs")
        },
        "each": " ".join(f"{x:.4f}" for x in nll),
    }


def rows(
    lengths: tuple[int, int], count: int = NUM_TEXTS, pools: Sequence[int] = POOLS
) -> Iterator[dict[str, Any]]:
    """All pools; the first of them is for all."""
    load = texts(lengths, count)
    full: list[float] = []
    for num_seqs in pools:
        profile = pressed(num_seqs, lengths, count, BUDGET, SHAPE)
        pressure, stock, at_prompt_end = profile.sides
        sides: tuple[Side, ...] = (pressure,)
        if num_seqs == pools[0]:
            sides = stock, pressure
        elif num_seqs == min(pools):
            sides = pressure, at_prompt_end
        for side in sides:
            nll, steps = judged(profile, side, load)
            full = full or nll
            yield row_of(profile, side, nll, full, steps)


def main() -> None:
    """Measure, print, and append to the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lengths", nargs=2, type=int, default=(256, 256), metavar="TOKENS")
    parser.add_argument("--texts", type=int, default=NUM_TEXTS, help="at once")
    parser.add_argument("--pools", nargs="+", type=int, default=POOLS, help="the largest first")
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    args = parser.parse_args()
    os.environ.update({**ENVIRONMENT, **ON_CPU})
    print("| pool for | side | nats above full | preempted | evicted | packs |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for row in rows(tuple(args.lengths), args.texts, args.pools):
        print(
            f"| {row['profile'][3:]} | {row['side']} "
            f"| {row['above_full']:.4f} ± {row['standard_error']:.4f} | {row['preemptions']} "
            f"| {row['evicted_tokens']} | {row['pressure_packs']} |",
            flush=True,
        )
        if args.csv:
            append_rows(args.csv, [row])


if __name__ == "__main__":
    main()
