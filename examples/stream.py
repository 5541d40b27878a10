"""A text without an end: ``python -m examples.stream FILE [--model MODEL]``.

Reads a text to a model, step by step, in constant memory: with positions that roll it may be longer
than what the model was trained on. Each line says how far it is, where the model thinks it is, how
many tokens it holds, and what the next ones cost.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks.smollm2 import model_dir
from benchmarks.streams import VARIANTS, engine, read


def main() -> None:
    """Print a line for each step."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, help="a file")
    parser.add_argument("--model", help="a folder or a name; by default the demo's model")
    parser.add_argument("--policy", choices=VARIANTS, default="streaming")
    parser.add_argument("--cache", type=int, default=1024, help="slots")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a step")
    parser.add_argument("--limit", type=int, help="positions; by default the model's own")
    arguments = parser.parse_args()
    model = arguments.model or str(model_dir())
    text = arguments.text.read_text(encoding="utf-8")
    tokens = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    shape = (arguments.cache, arguments.chunk, arguments.limit)
    print(f"{len(tokens)} tokens")
    with engine(model, arguments.policy, len(tokens), *shape) as llm:
        for step in read(llm, tokens):
            cost = f"{float(step.nll.mean()):.3f}" if len(step.nll) else "-"
            print(
                f"token {step.start + len(step.nll)}: position {step.position}, "
                f"{step.resident} resident, renumbered {step.renumbered} times, "
                f"{cost} nats per token, {len(step.nll) / step.seconds:.0f} tokens/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
