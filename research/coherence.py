# SPDX-License-Identifier: Apache-2.0
"""Measure whether text from few slots holds together: ``python -m research.coherence``."""

from __future__ import annotations

import argparse
import math
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.quality.writing import distinct_4_grams
from benchmarks.record import append_rows, machine_name
from benchmarks.smollm2 import MODEL, model_dir

BUDGET, BLOCK_SIZE, LENGTH, SEED, TEMPERATURE = 64, 16, 500, 1, 0.7

POLICIES = ("full", "h2o", "h2o2", "streaming", "local")

OPENINGS = (
    "The lighthouse keeper had lived alone on the island for thirty years, and every evening he",
    "Photosynthesis is the process by which plants turn light into chemical energy. It begins when",
    "When the railway reached the valley in 1871, the people of the town were divided. Some",
    "To bake a good loaf of bread at home you need only flour, water, salt and time. First,",
    "My grandmother kept a diary during the war. In it she wrote that",
    "The three most important ideas in economics are",
    "Dear Sir, I am writing to complain about",
    "The ship left harbour at dawn with twelve men aboard, and none of them knew that",
)


def mean_nll(output: Any, start: int) -> float:
    """Mean negative log-likelihood, in nats, of a prompt's tokens from ``start`` on.

    Args:
        output: vLLM's RequestOutput of a request with ``prompt_logprobs=0``.
        start: first token that counts.

    """
    entries = output.prompt_logprobs[start:]
    values = [-next(iter(entry.values())).logprob for entry in entries]
    return sum(values) / len(values)


def generate(
    policy: str, options: dict[str, Any] | None, length: int
) -> tuple[list[list[int]], list[list[int]]]:
    """The openings' tokens, and the ``length`` tokens that the policy makes of each."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model_dir("float32", progress=False)),
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        block_size=BLOCK_SIZE,
        kv_policy=policy,
        kv_policy_config=options,
    )
    params = SamplingParams(temperature=TEMPERATURE, seed=SEED, max_tokens=length, ignore_eos=True)
    outputs = llm.generate(list(OPENINGS), params)
    openings = [list(output.prompt_token_ids) for output in outputs]
    return openings, [list(output.outputs[0].token_ids) for output in outputs]


def judge(texts: list[list[int]], openings: list[list[int]], skip: int) -> list[float]:
    """Each text's mean NLL with the full cache, behind its first ``skip`` tokens."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model_dir("float32", progress=False)),
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        enable_prefix_caching=False,
    )
    whole = [{"prompt_token_ids": o + t} for o, t in zip(openings, texts, strict=True)]
    outputs = llm.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=0))
    return [mean_nll(out, len(o) + skip) for out, o in zip(outputs, openings, strict=True)]


def main() -> None:
    """Generate with each policy, judge, print and append to the CSV."""
    parser = argparse.ArgumentParser(prog="python -m research.coherence", description=__doc__)
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--tokens", type=int, default=LENGTH, help="of each text (%(default)s)")
    parser.add_argument("--budget", type=int, default=BUDGET, help="slots (%(default)s)")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    machine = {
        "machine": machine_name(),
        "vllm": version("vllm"),
        "model": MODEL,
        "budget": args.budget,
        "tokens": args.tokens,
        "texts": len(OPENINGS),
    }
    rows = []
    for policy in args.policies:
        options = None if policy == "full" else {"budget": args.budget}
        openings, texts = generate(policy, options, args.tokens)
        nll = judge(texts, openings, args.budget)
        distinct = [distinct_4_grams(text) for text in texts]
        mean = sum(nll) / len(nll)
        spread = math.sqrt(sum((value - mean) ** 2 for value in nll) / (len(nll) - 1))
        figures = {
            "policy": policy,
            "distinct_4_grams": round(sum(distinct) / len(distinct), 3),
            "perplexity": round(math.exp(mean), 2),
            "nll": round(mean, 3),
            "nll_std": round(spread, 3),
        }
        print(figures)
        rows.append(machine | figures)
    if args.csv:
        append_rows(args.csv, rows)


if __name__ == "__main__":
    main()
