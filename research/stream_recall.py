# SPDX-License-Identifier: Apache-2.0
"""Ask far into a text for facts that it said lately: ``python -m research.stream_recall``.

After a preamble of State of the Union addresses, taken in by chunks with positions that roll, come
questions for facts, each at the end of a prompt of its own that states the fact, and followed by
its answer. All are one text, without an end in sight. The same prompts are also read afresh, each
by a request that begins shortly before it, and that has all its positions as they are.

A fact is found when each of its tokens is the model's own first choice.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from vllm import LLM

from benchmarks.quality.facts import Facts, encode, facts
from benchmarks.quality.paired import paired
from benchmarks.quality.phrasings import CONFIRMATION
from benchmarks.record import append_rows, machine_name
from benchmarks.smollm2 import MODEL, model_dir
from research.streams import VARIANTS, engine, read, text

TRAINED = 8192
"""Positions that the model knows."""


@dataclass(frozen=True)
class Asked:
    """One question, in the text of all.

    Args:
        start: where its prompt begins.
        answer: where the fact begins.
        end: one past its last token.

    """

    start: int
    answer: int
    end: int


def stream(tokenizer: Tokenizer, task: Facts, preamble: int) -> tuple[list[int], list[Asked]]:
    """Token ids of a preamble and all prompts with their answers, and where these are."""
    tokens, asked = text(tokenizer, preamble) if preamble else [], list[Asked]()
    between = encode(tokenizer, "\n\n")
    for context, tail, answers in zip(task.context, task.tail, task.answers, strict=True):
        of_fact = (answers == 0).nonzero()[:, 0].tolist()
        start, tail_start = len(tokens) + len(between), len(tokens) + len(between) + len(context)
        tokens += between + context.tolist() + tail[: of_fact[-1] + 1].tolist()
        asked.append(Asked(start, tail_start + of_fact[0], len(tokens)))
    return tokens, asked


def answer(
    llm: LLM, tokens: Sequence[int], asked: Sequence[Asked]
) -> list[tuple[bool, float, int]]:
    """Return for each question: whether its fact is found, nats, and renumberings before it.

    Args:
        llm: of :func:`research.streams.engine`.
        tokens: of the text.
        asked: questions in it.

    """
    steps = list(read(llm, tokens))
    nll, first = (torch.cat([getattr(step, name) for step in steps]) for name in ("nll", "first"))
    found = []
    for one in asked:
        of_fact = slice(one.answer - 1, one.end - 1)  # the first token is not judged
        renumbered = max(step.renumbered for step in steps if step.start < one.end)
        found.append((bool(first[of_fact].all()), float(nll[of_fact].sum()), renumbered))
    return found


def rows(llm: LLM, tokens: list[int], asked: list[Asked], warm_up: int) -> Iterator[dict[str, Any]]:
    """A row for each question, far into the text and afresh."""
    far = answer(llm, tokens, asked)
    for number, (one, (found, nats, renumbered)) in enumerate(zip(asked, far, strict=True)):
        begin = max(one.start - warm_up, 0)
        alone = Asked(one.start - begin, one.answer - begin, one.end - begin)
        ((found_afresh, nats_afresh, _),) = answer(llm, tokens[begin : one.end], [alone])
        yield {
            "question": number,
            "start": one.start,
            "renumbered": renumbered,
            "found": int(found),
            "nats": round(nats, 4),
            "afresh_from": begin,
            "found_afresh": int(found_afresh),
            "nats_afresh": round(nats_afresh, 4),
        }


def run(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All rows of some policies, which are also appended to the CSV."""
    model = model_dir(arguments.dtype)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    task = facts(tokenizer, CONFIRMATION, "asked_now", arguments.questions, arguments.prompt)
    tokens, asked = stream(tokenizer, task, arguments.preamble)
    for name in arguments.policies:
        shape = (arguments.cache, arguments.chunk, arguments.limit)
        with engine(model, name, len(tokens), *shape, dtype=arguments.dtype) as llm:
            for row in rows(llm, tokens, asked, arguments.warm_up):
                whole = {
                    "machine": machine_name(),
                    "model": f"{MODEL}, {arguments.dtype}",
                    "policy": name,
                    "cache": arguments.cache,
                    "chunk": arguments.chunk,
                    "position_limit": arguments.limit or TRAINED,
                    "prompt": arguments.prompt,
                    **row,
                }
                if arguments.csv:
                    append_rows(arguments.csv, [whole])
                yield whole


def summary(every: Sequence[dict[str, Any]]) -> str:
    """A line for each policy: found far and afresh, the difference and its standard error."""
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in every):
        own = [row for row in every if row["policy"] == policy]
        found, afresh = ([int(row[name]) for row in own] for name in ("found", "found_afresh"))
        difference, error = paired(found, afresh)
        lines.append(
            f"{policy}: found {sum(found)} of {len(own)}, afresh {sum(afresh)}, difference "
            f"{difference:+.3f} +- {error:.3f}"
        )
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    few = ["streaming", "h2o", "h2o mean"]
    parser.add_argument("--policies", nargs="+", choices=VARIANTS, default=few)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=768, help="tokens of each question's prompt")
    parser.add_argument("--preamble", type=int, default=16384, help="tokens before the first")
    parser.add_argument("--warm-up", type=int, default=512, help="tokens before one read afresh")
    parser.add_argument("--cache", type=int, default=1024, help="slots")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a step")
    parser.add_argument("--limit", type=int, help="positions; by default the model's own")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--csv", type=Path)
    return parser.parse_args(argv)


def main() -> None:
    """Run what is asked for."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print(summary(list(run(parse()))))


if __name__ == "__main__":
    main()
