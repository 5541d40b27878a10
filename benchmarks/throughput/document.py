# SPDX-License-Identifier: Apache-2.0
"""P12: one document that many questions are asked about, which nobody knows when it is read.

Stock vLLM computes the document for each question; with its prefix cache it keeps all tokens of
it. ``h2o2`` reads it twice, keeps a share of it, and each question continues from there; or
from files that an earlier engine has left. The sides take turns. A question is found when each
token of its answer is the model's own first choice.

Usage::

    python -m benchmarks.throughput.document [--rounds 3] [--length 3000] [--questions 12]
        [--share 0.2] [--restart] [--csv FILE]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer
from vllm import LLM, SamplingParams, TokensPrompt

from benchmarks.quality.facts import document
from benchmarks.quality.forced import BLOCK_SIZE, force, forced_engine
from benchmarks.quality.phrasings import CONFIRMATION
from benchmarks.record import append_rows, machine_name
from benchmarks.smollm2 import MODEL, model_dir
from benchmarks.throughput import runs
from benchmarks.throughput.runs import ENVIRONMENT, ON_CPU

DTYPE = "float32"
STOCK, CACHED, OURS = "stock vLLM", "stock vLLM, prefix caching", "h2o2, score=reconstruction"
FILES = "h2o2, score=reconstruction, from files"
SIDES = (STOCK, CACHED, OURS)
RESTART = (OURS, FILES)
"""Sides that are compared before and after a restart."""
LONGEST = 160
"""Tokens of a question and its answer, at most."""


@dataclass(frozen=True)
class Work:
    """Sizes of the work.

    Args:
        length: of the document, in tokens.
        questions: number of them.
        share: of the document that is kept.
        number: of the document.

    """

    length: int = 3000
    questions: int = 12
    share: float = 0.2
    number: int = 0

    @property
    def budget(self) -> int:
        """Slots of a sequence, whole pages of them."""
        return BLOCK_SIZE * round(self.share * self.length / BLOCK_SIZE)


def keep(llm: LLM, text: list[int]) -> None:
    """Have the document read and its cache kept: its files are there when it is answered."""
    params = SamplingParams(max_tokens=1, extra_args={"kv_save": 1})
    llm.generate([TokensPrompt(prompt_token_ids=text)], params, use_tqdm=False)


def measure(side: str, work: Work) -> dict[str, Any]:
    """Run one engine, ask everything at once, and return its row."""
    with TemporaryDirectory() as folder:
        return _measure(side, work, folder)


def _measure(side: str, work: Work, folder: str) -> dict[str, Any]:
    model = model_dir(DTYPE)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text, asked = document(tokenizer, CONFIRMATION, work.questions, work.length, work.number)
    is_ours = side in (OURS, FILES)
    options = {
        "score": "reconstruction",
        "budget": work.budget,
        "continuation": folder if side == FILES else True,
    }
    engine = partial(
        forced_engine,
        str(model),
        "h2o2" if is_ours else None,
        options if is_ours else None,
        work.length + LONGEST,
        enable_prefix_caching=side == CACHED,
        max_num_batched_tokens=2048,
    )
    if side == FILES:
        with engine() as llm:
            keep(llm, text)
    with engine() as llm:
        start = time.perf_counter()
        if side in (CACHED, OURS):  # one token more than the document, of which nothing is kept
            force(llm, [(text, asked[0][0][:1])], [None], progress=False)
        read = time.perf_counter() - start
        texts = [([*text, *question], answer) for question, answer in asked]
        judged = force(llm, texts, [None] * len(texts), progress=False)
        seconds = time.perf_counter() - start
    return {
        "side": side,
        "machine": machine_name(),
        "vllm": version("vllm"),
        "model": MODEL,
        "dtype": DTYPE,
        "document": work.number,
        "length": work.length,
        "budget": work.budget if is_ours else work.length + LONGEST,
        "questions": work.questions,
        "found": sum(all(each.first) for each in judged),
        "cached": round(statistics.fmean(each.num_cached_tokens for each in judged)),
        "read_s": round(read, 2),
        "seconds": round(seconds, 2),
    }


def rows(rounds: int, work: Work, sides: Sequence[str] = SIDES) -> Iterator[dict[str, Any]]:
    """Yield a row for each engine: the sides take turns, and another one begins each round."""
    profile = "P12 restart" if FILES in sides else "P12"
    for number in range(rounds):
        begun = number % len(sides)
        for side in (*sides[begun:], *sides[:begun]):
            yield {"round": number, "profile": profile, **measure(side, work)}


def ratios(found: Sequence[dict[str, Any]], side: str, ours: str = OURS) -> list[float]:
    """Return how many times as long as ours a side took, in each round."""
    return runs.ratios(found, "seconds", side, ours, turn="round")


def main() -> None:
    """Measure, print, append to the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="engines of each side (3)")
    parser.add_argument("--length", type=int, default=Work.length, help="tokens (3000)")
    parser.add_argument("--questions", type=int, default=Work.questions, help="at once (12)")
    parser.add_argument("--share", type=float, default=Work.share, help="that is kept (0.2)")
    parser.add_argument("--restart", action="store_true", help="h2o2 before and after a restart")
    parser.add_argument("--document", type=int, default=Work.number, help="its number (0)")
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    args = parser.parse_args()
    os.environ.update({**ENVIRONMENT, **ON_CPU})
    found = []
    print("| side | found | reading, s | all, s |")
    print("| --- | ---: | ---: | ---: |")
    work = Work(args.length, args.questions, args.share, args.document)
    sides = RESTART if args.restart else SIDES
    for row in rows(args.rounds, work, sides):
        found.append(row)
        print(
            f"| {row['side']} | {row['found']} | {row['read_s']} | {row['seconds']} |", flush=True
        )
        if args.csv:
            append_rows(args.csv, [row])
    last = sides[-1]
    for side in sides[:-1]:
        print(f"{side}: {runs.spread(ratios(found, side, last))} times {last}")


if __name__ == "__main__":
    main()
