# SPDX-License-Identifier: Apache-2.0
"""P9: a text that is copied, with drafts by n-grams and without, with the policy and without.

Usage::

    python -m benchmarks.throughput.drafts [--requests 6] [--csv FILE]

A prompt is a passage and its first half again; a model that copies goes on with the second half,
and what an n-gram finds in the prompt is what it says. One request runs at a time, greedily.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from vllm import SamplingParams

from benchmarks.quality.forced import in_process
from benchmarks.quality.texts import TEXTS, windows
from benchmarks.record import append_rows, machine_name
from benchmarks.smollm2 import MODEL, model_dir
from benchmarks.throughput.profiles import MARGIN
from benchmarks.throughput.runs import ENVIRONMENT, ON_CPU
from benchmarks.throughput.watch import watching

DTYPE = "float32"
PASSAGE = 192
DRAFTS, EVERY = 4, 16
"""Tokens that are drafted, and evicted, at a time."""
SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTS,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
SIDES: Mapping[str, dict[str, Any]] = {
    "stock vLLM": {},
    "h2o, 50 %": {
        "kv_policy": "h2o",
        "kv_policy_config": {"budget": 0.5, "evict_every": EVERY},
    },
}


def passages(count: int) -> list[list[int]]:
    """So many stretches of ``TEXTS``, in turn."""
    tokenizer = Tokenizer.from_file(str(model_dir(DTYPE) / "tokenizer.json"))
    each = -(-count // len(TEXTS))
    found = [windows(tokenizer, text, each, PASSAGE).tolist() for text in TEXTS]
    return [part[i] for i in range(each) for part in found][:count]


def measure(side: str, drafts: bool, copied: Sequence[Sequence[int]]) -> dict[str, Any]:
    """One engine: its speed, what it accepted, and how much of each text is the passage's."""
    half = PASSAGE // 2
    settings = dict(SIDES[side])
    if drafts:
        settings["speculative_config"] = SPECULATION
    engine = in_process(
        model=str(model_dir(DTYPE)),
        dtype=DTYPE,
        enforce_eager=True,
        max_model_len=2 * PASSAGE + MARGIN,
        max_num_seqs=1,
        block_size=32,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **settings,
    )
    params = SamplingParams(temperature=0, max_tokens=half, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [*text, *text[:half]]} for text in copied]
    with watching() as watch, engine as llm:
        llm.generate(prompts[:1], params, use_tqdm=False)
        watch.drafted = watch.accepted = watch.evicted_tokens = 0
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
    said = [list(output.outputs[0].token_ids) for output in outputs]
    pairs = zip(said, (text[half:] for text in copied), strict=True)
    same = sum(a == b for ours, right in pairs for a, b in zip(ours, right, strict=True))
    return {
        "profile": "P9",
        "side": side,
        "drafts": DRAFTS if drafts else 0,
        "machine": machine_name(),
        "vllm": version("vllm"),
        "model": MODEL,
        "dtype": DTYPE,
        "input_len": PASSAGE + half,
        "output_len": half,
        "num_prompts": len(copied),
        "seconds": round(seconds, 3),
        "output_tokens_per_s": round(len(copied) * half / seconds, 2),
        "drafted": watch.drafted,
        "accepted": watch.accepted,
        "evicted_tokens": watch.evicted_tokens,
        "copied": round(same / (len(copied) * half), 4),
    }


def rows(count: int) -> Iterator[dict[str, Any]]:
    """Stock vLLM and the policy in turn, without drafts and with them."""
    copied = passages(count)
    for drafts in (False, True):
        for side in SIDES:
            yield measure(side, drafts, copied)


def main() -> None:
    """Measure, print, append to the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=6, help="passages to copy")
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    args = parser.parse_args()
    os.environ.update({**ENVIRONMENT, **ON_CPU})
    print("| side | drafts | tokens/s | accepted | evicted | copied |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows(args.requests):
        share = f"{row['accepted']} of {row['drafted']}" if row["drafts"] else "-"
        print(
            f"| {row['side']} | {row['drafts']} | {row['output_tokens_per_s']} | {share} "
            f"| {row['evicted_tokens']} | {row['copied']:.0%} |",
            flush=True,
        )
        if args.csv:
            append_rows(args.csv, [row])


if __name__ == "__main__":
    main()
