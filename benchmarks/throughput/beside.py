# SPDX-License-Identifier: Apache-2.0
"""P11: sequences that decode beside one long prompt, which is read once or twice.

Usage::

    python -m benchmarks.throughput.beside [--pairs 3] [--prompt 7000] [--csv FILE]

Streams decode; a long prompt arrives. From its arrival to its first token, each step gives every
stream a token and computes a part of the prompt. ``h2o2`` reads the prompt once with
``score=combined`` and twice with ``score=reconstruction``; the two take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from vllm import SamplingParams

from benchmarks.quality.forced import in_process
from benchmarks.quality.texts import windows
from benchmarks.record import append_rows, machine_name
from benchmarks.smollm2 import MODEL, model_dir
from benchmarks.throughput import runs
from benchmarks.throughput.profiles import MARGIN
from benchmarks.throughput.runs import ENVIRONMENT, ON_CPU

DTYPE = "float32"
SCORES = ("combined", "reconstruction")
STREAM_PROMPT = 64


@dataclass(frozen=True)
class Work:
    """Sizes of the work of one engine.

    Args:
        prompt: length of the prompt that arrives, in tokens.
        streams: sequences that decode beside it.
        batched: ``max_num_batched_tokens``, in tokens.

    """

    prompt: int = 7000
    streams: int = 8
    batched: int = 512


def texts(work: Work) -> tuple[list[int], list[list[int]]]:
    """Return token ids: the long prompt's, and each stream's prompt."""
    tokenizer = Tokenizer.from_file(str(model_dir(DTYPE) / "tokenizer.json"))
    long = windows(tokenizer, "moby_dick", 1, work.prompt)[0].tolist()
    short = windows(tokenizer, "union_1990s", work.streams, STREAM_PROMPT).tolist()
    return long, short


def measure(score: str, work: Work) -> dict[str, Any]:
    """Run one engine; return its row: the steps until the long prompt's first token."""
    long, short = texts(work)
    limit = work.prompt + MARGIN
    engine = in_process(
        model=str(model_dir(DTYPE)),
        dtype=DTYPE,
        enforce_eager=True,
        max_model_len=limit,
        max_num_seqs=work.streams + 1,
        max_num_batched_tokens=work.batched,
        block_size=32,
        enable_prefix_caching=False,
        kv_policy="h2o2",
        kv_policy_config={"score": score, "budget": 0.2},
    )
    with engine as llm:
        add, step = llm.llm_engine.add_request, llm.llm_engine.step
        params = SamplingParams(
            temperature=0, max_tokens=limit - STREAM_PROMPT, ignore_eos=True, detokenize=False
        )
        for i, prompt in enumerate(short):
            add(f"stream-{i}", {"prompt_token_ids": prompt}, params)
        for _ in range(2 + work.streams):
            step()  # each stream decodes from here on
        once = SamplingParams(temperature=0, max_tokens=2, detokenize=False)
        add("long", {"prompt_token_ids": long}, once)
        seconds: list[float] = []
        first = False
        while not first:
            start = time.perf_counter()
            outputs = step()
            seconds.append(time.perf_counter() - start)
            first = any(output.request_id.startswith("long") for output in outputs)
        for i in range(work.streams):
            llm.llm_engine.abort_request([f"stream-{i}"])
        while llm.llm_engine.has_unfinished_requests():
            step()
    return {
        "profile": "P11",
        "side": f"h2o2, score={score}",
        "machine": machine_name(),
        "vllm": version("vllm"),
        "model": MODEL,
        "dtype": DTYPE,
        "prompt_len": work.prompt,
        "streams": work.streams,
        "max_num_batched_tokens": work.batched,
        "steps": len(seconds),
        "mean_step_ms": round(1000 * statistics.fmean(seconds), 1),
        "longest_step_ms": round(1000 * max(seconds), 1),
        "ttft_s": round(sum(seconds), 2),
    }


def rows(pairs: int, work: Work) -> Iterator[dict[str, Any]]:
    """Yield a row for each engine; the scores take turns, and who begins alternates."""
    for number in range(pairs):
        order: Sequence[str] = SCORES if number % 2 == 0 else SCORES[::-1]
        for score in order:
            yield {"pair": number, **measure(score, work)}


def ratios(found: Sequence[dict[str, Any]], column: str) -> list[float]:
    """Return, for each pair, the second reading's value over the single reading's."""
    once, twice = (f"h2o2, score={score}" for score in SCORES)
    return runs.ratios(found, column, twice, once)


def main() -> None:
    """Measure, print, append to the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=3, help="engines of each score (3)")
    parser.add_argument("--prompt", type=int, default=Work.prompt, help="tokens (7000)")
    parser.add_argument("--streams", type=int, default=Work.streams, help="sequences (8)")
    parser.add_argument("--batched", type=int, default=Work.batched, help="tokens a step (512)")
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    args = parser.parse_args()
    os.environ.update({**ENVIRONMENT, **ON_CPU})
    found = []
    print("| side | steps | mean ms | longest ms | first token, s |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for row in rows(args.pairs, Work(args.prompt, args.streams, args.batched)):
        found.append(row)
        print(
            f"| {row['side']} | {row['steps']} | {row['mean_step_ms']} "
            f"| {row['longest_step_ms']} | {row['ttft_s']} |",
            flush=True,
        )
        if args.csv:
            append_rows(args.csv, [row])
    for column in ("mean_step_ms", "longest_step_ms", "ttft_s"):
        print(f"{column}: {runs.spread(ratios(found, column))}")


if __name__ == "__main__":
    main()
