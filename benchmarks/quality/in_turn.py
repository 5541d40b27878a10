# SPDX-License-Identifier: Apache-2.0
"""Ten questions in turn about a document that is evicted from before the first one is asked.

Each turn's prompt is the document, the questions and answers so far, and a question; with
``continuation`` it begins from what the last turn has left. Answers are forced, so that every side
reads the same. A fact is found when each of its tokens is the model's own first choice.

Usage::

    python -m benchmarks.quality.in_turn [--shares 0.2 ...] [--policies h2o2 ...] [--csv FILE]
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from vllm import LLM

from benchmarks.quality.facts import document
from benchmarks.quality.forced import force, forced_engine
from benchmarks.quality.phrasings import CONFIRMATION, DEVELOPMENT, Source
from benchmarks.quality.plans import VARIANTS, slots
from benchmarks.record import append_rows, machine_name
from benchmarks.smollm2 import MODEL, model_dir
from benchmarks.throughput.runs import ENVIRONMENT, ON_CPU

DTYPE = "float32"
FULL = "full"
POLICIES = ("h2o2 reconstruction", "h2o2")
TOGETHER = 16
"""Documents that an engine holds at once."""
LONGEST = 64
"""Tokens of a question and its answer, at most."""
Document = tuple[list[int], list[tuple[list[int], list[int]]]]
"""Its tokens, and those of each question and of its answer."""


@dataclass(frozen=True)
class Work:
    """Sizes of the work.

    Args:
        documents: number of them.
        length: tokens of each.
        questions: about each, in turn.

    """

    documents: int = 48
    length: int = 1024
    questions: int = 10

    def make(self, tokenizer: Tokenizer, source: Source) -> list[Document]:
        """Every document, with its questions."""
        asked = self.questions, self.length
        return [document(tokenizer, source, *asked, number=n) for n in range(self.documents)]


def answered(llm: LLM, documents: Sequence[Document]) -> Iterator[tuple[list[bool], float]]:
    """Ask all documents each question; what was found, and the mean of tokens not computed again.

    A document is read first, on its own: nothing knows of the questions when it is evicted from.
    """
    texts = [list(text) for text, _ in documents]
    nobody = [None] * len(texts)
    force(llm, [(text, [text[-1]]) for text in texts], nobody, progress=False)
    for turn in zip(*(asked for _, asked in documents), strict=True):
        for text, (question, _) in zip(texts, turn, strict=True):
            text += question
        answers = [answer for _, answer in turn]
        judged = force(llm, list(zip(texts, answers, strict=True)), nobody, progress=False)
        cached = statistics.fmean(each.num_cached_tokens for each in judged)
        yield [all(each.first) for each in judged], cached
        for text, answer in zip(texts, answers, strict=True):
            text += answer


def rows(
    work: Work, policy: str, share: float, source: Source = CONFIRMATION
) -> Iterator[dict[str, Any]]:
    """Yield a row for each turn.

    Args:
        work: its sizes.
        policy: of :data:`benchmarks.quality.plans.VARIANTS`; "full": stock vLLM.
        share: of a document that is kept.
        source: what documents are made from.

    """
    model = model_dir(DTYPE)
    documents = work.make(Tokenizer.from_file(str(model / "tokenizer.json")), source)
    budget = slots(share, work.length)
    name, options = (None, None) if policy == FULL else VARIANTS[policy]
    longest = work.length + LONGEST * work.questions
    engine = forced_engine(
        str(model),
        name,
        options if options is None else {**options, "budget": budget, "continuation": True},
        longest,
        DTYPE,
        enable_prefix_caching=name is None,
    )
    with engine as llm:
        parts = [documents[i : i + TOGETHER] for i in range(0, len(documents), TOGETHER)]
        every = [list(answered(llm, part)) for part in parts]
    for number, turns in enumerate(zip(*every, strict=True)):
        hits = [hit for found, _ in turns for hit in found]
        yield {
            "machine": machine_name(),
            "vllm": version("vllm"),
            "model": MODEL,
            "dtype": DTYPE,
            "source": source.name,
            "length": work.length,
            "policy": policy,
            "share": share,
            "slots": longest if name is None else budget,
            "turn": number + 1,
            "cached": round(statistics.fmean(cached for _, cached in turns)),
            "count": len(hits),
            "found": round(statistics.fmean(hits), 4),
            "each": " ".join(str(int(hit)) for hit in hits),
        }


def main() -> None:
    """Measure, print, and append to the CSV; the full cache comes first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--documents", type=int, default=Work.documents, help="of 1,024 tokens (48)"
    )
    parser.add_argument("--shares", nargs="+", type=float, default=[0.2], help="budgets (0.2)")
    parser.add_argument("--policies", nargs="*", default=POLICIES, choices=VARIANTS)
    parser.add_argument("--dev", action="store_true", help="documents of development")
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    args = parser.parse_args()
    os.environ.update({**ENVIRONMENT, **ON_CPU})
    source, work = DEVELOPMENT if args.dev else CONFIRMATION, Work(args.documents)
    sides = [(FULL, 1.0), *((name, share) for name in args.policies for share in args.shares)]
    for policy, share in sides:
        for row in rows(work, policy, share, source):
            print(*(row[name] for name in ("policy", "slots", "turn", "cached", "found")))
            if args.csv:
                append_rows(args.csv, [row])


if __name__ == "__main__":
    main()
