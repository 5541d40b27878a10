# SPDX-License-Identifier: Apache-2.0
"""Run one engine of the demo: generate, watch the pool, print JSON.

Usage::

    python -m demo.generate MODEL [--kv-policy h2o]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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


def run(engine: Any, result: Result) -> Result:
    """Step until all requests are done, with a progress bar on stderr."""
    scheduler = engine.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    requests: dict[str, Any] = {}
    running: list[int] = []
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens · {task.fields[running]:2} sequences at once"),
        TimeRemainingColumn(),
    )
    start = time.perf_counter()
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        bar = progress.add_task(result.name, total=NUM_REQUESTS * OUTPUT_TOKENS, running=0)
        done: dict[str, int] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                done[output.request_id] = len(output.outputs[0].token_ids)
                if output.request_id == "0":
                    result.text = output.outputs[0].text
            held = [len(manager.get_block_ids(r.request_id)[0]) for r in scheduler.running]
            requests.update(scheduler.requests)
            result.peak_pages_per_sequence = max([result.peak_pages_per_sequence, *held])
            result.peak_pages = max(result.peak_pages, sum(held))
            running.append(len(held))
            progress.update(bar, completed=sum(done.values()), running=len(held))
    result.mean_sequences = sum(running) / len(running)
    result.seconds = time.perf_counter() - start
    result.tokens = sum(done.values())
    result.preemptions = sum(request.num_preemptions for request in requests.values())
    return result


def main() -> None:
    """Run one engine and print its result as the last line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--kv-policy", default=None)
    args = parser.parse_args()
    name = f"--kv-policy {args.kv_policy}" if args.kv_policy else "stock vLLM"
    engine = make_engine(args.model, args.kv_policy)
    add_requests(engine)
    print(json.dumps(asdict(run(engine, Result(name)))))


if __name__ == "__main__":
    main()
