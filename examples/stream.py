# SPDX-License-Identifier: Apache-2.0
"""Read a text longer than the model's context: ``python -m examples.stream FILE [--model MODEL]``.

Positions roll and the prompt is evicted from after each chunk, so a text of any length needs the
memory of ``--cache`` tokens and one chunk. Each line says what a part of the text costs the model,
in nats per token.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.smollm2 import model_dir


def main() -> None:
    """Print a line for each part of the text."""
    from vllm import LLM, SamplingParams

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, help="a file")
    parser.add_argument("--model", help="a folder or a name; by default the demo's model")
    parser.add_argument("--policy", default="streaming")
    parser.add_argument("--cache", type=int, default=1024, help="tokens that stay in the cache")
    parser.add_argument("--chunk", type=int, default=256, help="tokens computed in one step")
    parser.add_argument("--limit", type=int, help="positions; by default the model's own")
    parser.add_argument("--part", type=int, default=1024, help="tokens of a line")
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    llm = LLM(
        arguments.model or str(model_dir()),
        max_model_len=len(text.encode()) + 16,  # positions roll: no model is too short
        max_num_seqs=1,
        max_num_batched_tokens=arguments.chunk,
        block_size=16,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_policy=arguments.policy,
        kv_policy_config={
            "budget": arguments.cache,
            "eviction": "chunk",
            "positions": arguments.limit or "rolling",
        },
    )
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, flat_logprobs=True)
    (output,) = llm.generate(text, params)
    costs = [-next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
    print(f"{len(costs) + 1} tokens")
    for start in range(0, len(costs), arguments.part):
        part = costs[start : start + arguments.part]
        print(f"token {start + len(part)}: {sum(part) / len(part):.3f} nats per token")


if __name__ == "__main__":
    main()
