# SPDX-License-Identifier: Apache-2.0
"""Engines of others and ours in turn: ``python -m research.peers throughput`` or ``answers``.

Each side starts afresh for every figure. Pin it to one core, which every engine then has alone::

    taskset -c 0 python -m research.peers throughput --rounds 2
    taskset -c 0 python -m research.peers answers --budgets 96 192 320
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.quality.facts import Facts, facts
from benchmarks.quality.phrasings import CONFIRMATION
from benchmarks.quality.texts import TEXTS, windows
from benchmarks.record import append_rows, machine_name
from benchmarks.smollm2 import MODEL, model_dir
from benchmarks.throughput.profiles import MARGIN
from benchmarks.throughput.runs import ROOT
from research.peers.job import BLOCK_SIZE, Result
from research.peers.sides import SIDES, Shape, Side, run

RESULTS = ROOT / "research" / "results" / "peers.csv"
MAX_NUM_SEQS = 16


def row(
    task: str,
    side: Side,
    found: tuple[Result, int],
    pool_bytes: int,
    budget: int | None,
    prompt_len: int,
    answers: Sequence[bool] | None = None,
) -> dict[str, Any]:
    """One figure, as the CSV has it.

    Args:
        task: throughput or answers.
        side: the engine.
        found: by :func:`run`.
        pool_bytes: of K, V and scores, at most.
        budget: tokens; None: all.
        prompt_len: tokens of each prompt.
        answers: whether each question was answered.

    """
    result, rss = found
    count = sum(map(len, result.tokens))
    return {
        "task": task,
        "side": side.name,
        "machine": machine_name(),
        "versions": result.versions,
        "model": f"{MODEL}, float32",
        "requests": len(result.tokens),
        "prompt_len": prompt_len,
        "output_len": len(result.tokens[0]),
        "pool_bytes": pool_bytes,
        "budget": "" if budget is None else budget,
        "seconds": round(result.seconds, 2),
        "tokens_per_s": round(count / result.seconds, 2),
        "processor_seconds": round(result.processor_seconds, 2),
        "tokens_per_processor_s": round(count / result.processor_seconds, 2),
        "mean_sequences": round(result.mean_sequences, 2),
        "peak_sequences": result.peak_sequences,
        "preempted": "" if result.preempted < 0 else result.preempted,
        "peak_bytes": result.peak_bytes,
        "peak_rss_mib": rss,
        "found": "" if answers is None else sum(answers),
        "each": "" if answers is None else " ".join(str(int(hit)) for hit in answers),
    }


def throughput(
    sides: Sequence[Side],
    rounds: int,
    requests: int,
    lengths: tuple[int, int],
    whole: int,
    log: Path,
) -> Iterator[dict[str, Any]]:
    """All sides in turn, ``rounds`` times, in a pool for ``whole`` sequences of full length."""
    tokenizer = Tokenizer.from_file(str(model_dir("float32") / "tokenizer.json"))
    each = -(-requests // len(TEXTS))
    prompts = [ids for text in TEXTS for ids in windows(tokenizer, text, each, lengths[0]).tolist()]
    pool = whole * (sum(lengths) + MARGIN) * Shape.of(model_dir("float32")).bytes_per_token
    budget = BLOCK_SIZE * max(3, round(0.2 * sum(lengths) / BLOCK_SIZE))
    for _ in range(rounds):
        for side in sides:
            own = budget if side.evicts else None
            found = run(side, prompts[:requests], lengths[1], pool, MAX_NUM_SEQS, own, log)
            yield row("throughput", side, found, pool, own, lengths[0])


def questions(task: Facts) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts that end in a question and the beginning of its answer; how it goes on.

    Without the beginning this model repeats the question, whatever it was shown. One token of it
    is left to the engine, which says it before anything is evicted: so the whole fact comes after.
    """
    prompts, rests = [], []
    for context, tail, answers in zip(task.context, task.tail, task.answers, strict=True):
        (fact,) = (answers >= 0).nonzero(as_tuple=True)
        start = int(fact[0]) - 1
        prompts.append([*context.tolist(), *tail[:start].tolist()])
        rests.append(tail[start : int(fact[-1]) + 1].tolist())
    return prompts, rests


def answered(rests: Sequence[Sequence[int]], result: Result) -> list[bool]:
    """Whether each answer goes on as it should, to the token."""
    pairs = zip(rests, result.tokens, strict=True)
    return [list(said[: len(rest)]) == list(rest) for rest, said in pairs]


def answers(
    sides: Sequence[Side], budgets: Sequence[int], count: int, length: int, log: Path
) -> Iterator[dict[str, Any]]:
    """Facts that the end of a prompt asks for; it is evicted from before they are said."""
    tokenizer = Tokenizer.from_file(str(model_dir("float32") / "tokenizer.json"))
    task = facts(tokenizer, CONFIRMATION, "asked_now", count, length)
    prompts, rests = questions(task)
    longest = max(map(len, rests))
    # A prompt is held whole while it is computed: the pool is for that, budgets for what is left.
    pool = 5 * (max(map(len, prompts)) + longest + MARGIN)
    pool *= Shape.of(model_dir("float32")).bytes_per_token
    for side in sides:
        for budget in budgets if side.evicts else (None,):
            found = run(side, prompts, longest, pool, MAX_NUM_SEQS, budget, log)
            yield row("answers", side, found, pool, budget, task.length, answered(rests, found[0]))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format all figures as Markdown."""
    head = ("task", "side", "budget", "tokens/s", "per processor second", "at once", "preempted")
    head += ("MB held", "RSS, MiB", "found")
    lines = ["| " + " | ".join(head) + " |", "| --- | --- |" + " ---: |" * (len(head) - 2)]
    for found in rows:
        held = f"{found['peak_bytes'] / 1e6:.1f}"
        cells = (
            *(found[name] for name in ("task", "side", "budget", "tokens_per_s")),
            *(found[name] for name in ("tokens_per_processor_s", "mean_sequences", "preempted")),
            *(held, found["peak_rss_mib"], found["found"]),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is asked for; a row is in the file as soon as it is there."""
    parser = argparse.ArgumentParser(prog="python -m research.peers", description=__doc__)
    parser.add_argument("task", choices=("throughput", "answers"))
    parser.add_argument(
        "--quick", action="store_true", help="ours alone, three requests, for its functioning"
    )
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=1, help="of throughput, of all sides (1)")
    parser.add_argument("--requests", type=int, default=16, help="of throughput (16)")
    parser.add_argument(
        "--lengths", nargs=2, type=int, default=(256, 192), metavar="TOKENS",
        help="of each prompt, and generated for it (256 192)",
    )  # fmt: skip
    parser.add_argument("--whole", type=int, default=4, help="sequences that the pool holds (4)")
    parser.add_argument("--budgets", nargs="+", type=int, default=(96, 192, 320), help="of answers")
    parser.add_argument("--count", type=int, default=50, help="questions (50)")
    parser.add_argument("--length", type=int, default=1024, help="of their prompts (1024)")
    parser.add_argument("--csv", type=Path, default=RESULTS, help="append the figures to this file")
    args = parser.parse_args()
    if args.quick:
        args.sides, args.requests, args.lengths, args.whole = ["vLLM, h2o"], 3, (128, 16), 2
        args.count, args.budgets = 5, (96,)
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    log, rows = args.csv.with_suffix(".log"), []
    sides = [SIDES[name] for name in args.sides]
    if args.task == "throughput":
        lengths = (args.lengths[0], args.lengths[1])
        found = throughput(sides, args.rounds, args.requests, lengths, args.whole, log)
    else:
        found = answers(sides, args.budgets, args.count, args.length, log)
    for one in found:
        append_rows(args.csv, [one])
        rows.append(one)
        print(
            one["task"], one["side"], one["budget"], one["tokens_per_s"], one["found"], flush=True
        )
    print(table(rows))


if __name__ == "__main__":
    main()
