# SPDX-License-Identifier: Apache-2.0
"""Run one engine of the demo: generate, watch the pool, report each step as a line of JSON.

Usage::

    python -m demo.generate MODEL [--kv-policy h2o] [--report FD]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

NUM_REQUESTS = 16
OUTPUT_TOKENS = 400
POOL_PAGES = 65
BLOCK_SIZE = 32
MAX_MODEL_LEN = 512
BUDGET = 128

TOPICS = (
    "a lighthouse keeper who finds a letter in a bottle",
    "a clockmaker whose clocks begin to run backwards",
    "two sisters who cross the mountains in winter",
    "a fox who wants to learn to read",
    "the last train of the night and its only passenger",
    "a village that has forgotten how to sing",
    "an old map and the island that is not on it",
    "a baker who can taste what people are thinking",
)


@dataclass(frozen=True)
class Step:
    """The pool after one step.

    Args:
        seconds: time since the first step began.
        tokens: number of tokens generated so far, by all requests.
        sequences: number of running sequences.
        pages: pages that they hold.
        largest: pages of the sequence that holds most.

    """

    seconds: float
    tokens: int
    sequences: int
    pages: int
    largest: int


@dataclass
class Result:
    """The figures of one engine.

    Args:
        name: the engine, in words.
        peak_pages_per_sequence: most pages that one sequence held.
        peak_pages: most pages in use in a step.
        mean_sequences: running sequences, on average over the steps.
        preemptions: number of preemptions; a preempted sequence is computed again.
        seconds: time from the first request to the last token.
        tokens: number of generated tokens.
        text: text of the first request.

    """

    name: str
    peak_pages_per_sequence: int = 0
    peak_pages: int = 0
    mean_sequences: float = 0.0
    preemptions: int = 0
    seconds: float = 0.0
    tokens: int = 0
    text: str = ""


def make_engine(model: str, policy: str | None) -> Any:
    """Start an engine with a small pool, in this process, so that the pool can be read."""
    from vllm import LLM

    options = {"kv_policy": policy, "kv_policy_config": {"budget": BUDGET}} if policy else {}
    return LLM(
        model=model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=POOL_PAGES,
        max_num_seqs=NUM_REQUESTS,
        enable_prefix_caching=False,
        seed=0,
        **options,
    ).llm_engine


def add_requests(engine: Any) -> None:
    """Add all requests of the demo."""
    from vllm import SamplingParams

    tokenizer = engine.get_tokenizer()
    for i in range(NUM_REQUESTS):
        message = {
            "role": "user",
            "content": f"Write a long story about {TOPICS[i % len(TOPICS)]}.",
        }
        prompt = tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True
        )
        params = SamplingParams(temperature=0.7, seed=i, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        engine.add_request(str(i), prompt, params)


def steps(engine: Any, result: Result) -> Iterator[Step]:
    """Step until all requests are done, and fill in what is known only then."""
    scheduler = engine.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    requests: dict[str, Any] = {}
    done: dict[str, int] = {}
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            done[output.request_id] = len(output.outputs[0].token_ids)
            if output.request_id == "0":
                result.text = output.outputs[0].text
        requests.update(scheduler.requests)
        held = [len(manager.get_block_ids(r.request_id)[0]) for r in scheduler.running]
        seconds = time.perf_counter() - start
        yield Step(seconds, sum(done.values()), len(held), sum(held), max(held, default=0))
    result.seconds = time.perf_counter() - start
    result.tokens = sum(done.values())
    result.preemptions = sum(request.num_preemptions for request in requests.values())


def summarise(result: Result, each: list[Step]) -> Result:
    """Fill in what follows from the steps."""
    result.peak_pages_per_sequence = max(step.largest for step in each)
    result.peak_pages = max(step.pages for step in each)
    result.mean_sequences = sum(step.sequences for step in each) / len(each)
    return result


def main() -> None:
    """Run one engine: a line for each step, and its result as the last line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--kv-policy", default=None)
    parser.add_argument(
        "--report", type=int, default=1, metavar="FD", help="file to write lines to"
    )
    args = parser.parse_args()
    name = f"--kv-policy {args.kv_policy}" if args.kv_policy else "stock vLLM"
    engine = make_engine(args.model, args.kv_policy)
    add_requests(engine)
    result, each = Result(name), []
    with open(args.report, "w", buffering=1, closefd=False) as report:
        for step in steps(engine, result):
            each.append(step)
            print(json.dumps(asdict(step)), file=report)
        print(json.dumps(asdict(summarise(result, each))), file=report)


if __name__ == "__main__":
    main()
