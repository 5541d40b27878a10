# SPDX-License-Identifier: Apache-2.0
"""Measure how much of a fact stays in the cache: ``python -m research.kept``.

After a prompt has been evicted from, some layers and KV heads hold a token and others do not. A row
has the share that holds the fact's tokens, and the share that holds any token, on average. In
``asked_now`` the prompt ends with a question for the fact; in ``asked_later`` it does not.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.quality.facts import Facts, encode, facts
from benchmarks.quality.forced import forced_engine
from benchmarks.quality.phrasings import CONFIRMATION
from benchmarks.quality.plans import BLOCK_SIZE, VARIANTS, slots
from benchmarks.record import append_rows, machine_name
from benchmarks.smollm2 import MODEL, model_dir
from vllm_h2o.trace.record import NOTHING, record

FORMS = ("asked_now", "asked_later")


def places(task: Facts, tokenizer: Tokenizer, index: int) -> range:
    """Where in its context a fact stands: the tokens of its value."""
    context = task.context[index].tolist()
    fact = task.facts[index][0]
    said = encode(tokenizer, f" {fact.fill(fact.phrasing.said)}")
    (begin,) = (
        at for at in range(len(context) - len(said) + 1) if context[at : at + len(said)] == said
    )
    value = encode(tokenizer, f" {fact.value}")
    (within,) = (at for at in range(len(said)) if said[at : at + len(value)] == value)
    return range(begin + within, begin + within + len(value))


def shares(positions: np.ndarray, wanted: range) -> tuple[float, float]:
    """Return the share of heads that hold a fact's tokens, and its least-held token.

    Args:
        positions: [layers, heads, kept], ``NOTHING`` where a head holds less.
        wanted: positions of a fact.

    """
    each = [(positions == at).any(axis=2).mean() for at in wanted]
    return float(np.mean(each)), float(min(each))


def measure(policy: str, share: float, form: str, count: int) -> dict[str, object]:
    """One row: means over contexts."""
    folder = model_dir("float32")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    task = facts(tokenizer, CONFIRMATION, form)
    name, options = VARIANTS[policy]
    options = {**options, "budget": slots(share, task.length)}
    found, everything = [], []
    with forced_engine(str(folder), name, options, task.length + BLOCK_SIZE) as llm:
        for index in range(count):
            _, _, frames = record(llm, task.context[index].tolist(), every=1, max_tokens=2)
            positions = frames[0].position
            found.append(shares(positions, places(task, tokenizer, index)))
            everything.append((positions < NOTHING).sum() / positions[..., 0].size / task.length)
    whole, least = np.mean(found, axis=0)
    error = np.std([one[0] for one in found], ddof=1) / count**0.5
    return {
        "machine": machine_name(),
        "model": f"{MODEL}, float32",
        "task": form,
        "policy": policy,
        "budget": options["budget"],
        "count": count,
        "of_the_fact": round(float(whole), 4),
        "standard_error": round(float(error), 4),
        "of_its_rarest_token": round(float(least), 4),
        "of_all_tokens": round(float(np.mean(everything)), 4),
    }


def main() -> None:
    """Measure, print and append to the CSV."""
    parser = argparse.ArgumentParser(prog="python -m research.kept", description=__doc__)
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    parser.add_argument("--policies", nargs="+", choices=VARIANTS, default=["h2o2"])
    parser.add_argument("--share", type=float, default=0.3, help="the budget (0.3)")
    parser.add_argument("--count", type=int, default=50, help="contexts (50, all of them)")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for policy in args.policies:
        for form in FORMS:
            row = measure(policy, args.share, form, args.count)
            print(row, flush=True)
            if args.csv:
                append_rows(args.csv, [row])


if __name__ == "__main__":
    main()
