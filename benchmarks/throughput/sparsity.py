# SPDX-License-Identifier: Apache-2.0
"""P13: steps that read fewer weights, less of the cache, or less of both, beside stock vLLM's.

Usage::

    python -m benchmarks.throughput.sparsity [--rounds 3] [--dtype float32] [--csv FILE]

The model has the shapes of OPT-1.3B, a quarter of its layers and of its vocabulary, random weights,
and a bias with which ReLU sets nine of ten neurons to zero, drawn anew for every token. Sequences
arrive one after the other: as soon as there are as many as a row of the table wants, steps are
timed, in which each gets a token. All sides take turns in each round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import OPTConfig
from vllm import SamplingParams

from benchmarks.quality.forced import in_process
from benchmarks.record import append_rows, machine_name
from benchmarks.throughput import runs
from benchmarks.throughput.models import CACHE, write_sparse
from benchmarks.throughput.runs import ENVIRONMENT, ON_CPU

SHAPE = {
    "vocab_size": 50272 // 4,
    "hidden_size": 2048,
    "word_embed_proj_dim": 2048,
    "ffn_dim": 8192,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
ZEROS = 0.9
H2O = {"kv_policy": "h2o", "kv_policy_config": {"budget": 0.2}}
SIDES: dict[str, dict[str, Any]] = {
    "stock": {},
    "exact": {"contextual_sparsity": "exact"},
    "predicted": {"contextual_sparsity": "predicted"},
    "h2o": H2O,
    "h2o, exact": {**H2O, "contextual_sparsity": "exact"},
    "h2o, predicted": {**H2O, "contextual_sparsity": "predicted"},
}
SEQUENCES = (1, 2, 4, 8, 16)
PROMPT, LIMIT, STEPS = 448, 576, 12


def model_dir() -> str:
    """Return the model's folder, made if it is not there."""
    folder = CACHE / "opt-1.3b-quarter"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_sparse(OPTConfig(**SHAPE), folder, ZEROS)
        (folder / "done").touch()
    return str(folder)


def step_times(dtype: str, options: dict[str, Any]) -> dict[int, float]:
    """Run one engine; return the median of a step in ms by the number of sequences."""
    engine = in_process(
        model=model_dir(),
        dtype=dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=LIMIT,
        max_num_seqs=SEQUENCES[-1],
        max_num_batched_tokens=512,
        block_size=32,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=3 << 30,
        **options,
    )
    params = SamplingParams(
        temperature=0, max_tokens=LIMIT - PROMPT, ignore_eos=True, detokenize=False
    )
    found = {}
    with engine as llm:
        step = llm.llm_engine.step
        for number in range(SEQUENCES[-1]):
            prompt = [3 + (number + 7 * i) % (SHAPE["vocab_size"] - 3) for i in range(PROMPT)]
            llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
            step()
            if number + 1 in SEQUENCES:
                step()  # of the tokens of all, the first
                found[number + 1] = 1000 * statistics.median(_timed(step))
        llm.llm_engine.abort_request([str(number) for number in range(SEQUENCES[-1])])
        while llm.llm_engine.has_unfinished_requests():
            step()
    return found


def _timed(step: Any) -> Iterator[float]:
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        yield time.perf_counter() - start


def rows(rounds: int, dtype: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each engine and number of sequences; who begins a round alternates."""
    names = list(SIDES)
    for number in range(rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            for sequences, milliseconds in step_times(dtype, SIDES[name]).items():
                yield {
                    "profile": "P13",
                    "side": name,
                    "pair": number,
                    "machine": machine_name(),
                    "vllm": version("vllm"),
                    "dtype": dtype,
                    "zeros": ZEROS,
                    "prompt_len": PROMPT,
                    "sequences": sequences,
                    "step_ms": round(milliseconds, 2),
                }


def ratios(found: Sequence[dict[str, Any]], side: str, sequences: int) -> list[float]:
    """Return stock's step over this side's, sorted: one for each round."""
    rows = [row for row in found if row["sequences"] == sequences]
    return sorted(runs.ratios(rows, "step_ms", "stock", side))


def table(found: Sequence[dict[str, Any]]) -> str:
    """Format the medians, with the least and the greatest of the rounds."""
    lines = ["| stock's step / the side's | " + " | ".join(map(str, SEQUENCES)) + " |"]
    lines.append("| --- |" + " ---: |" * len(SEQUENCES))
    sides = {row["side"] for row in found} - {"stock"}
    for side in [name for name in SIDES if name in sides]:
        cells = [runs.spread(ratios(found, side, sequences)) for sequences in SEQUENCES]
        lines.append(f"| {side} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, append to the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="engines of each side (3)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    args = parser.parse_args()
    os.environ.update({**ENVIRONMENT, **ON_CPU, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    found = []
    for row in rows(args.rounds, args.dtype):
        found.append(row)
        print(f"{row['side']}, {row['sequences']} sequences: {row['step_ms']} ms", flush=True)
        if args.csv:
            append_rows(args.csv, [row])
    print(table(found))


if __name__ == "__main__":
    main()
