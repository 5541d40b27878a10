# SPDX-License-Identifier: Apache-2.0
"""A prompt longer than context and pool, over HTTP: ``python -m benchmarks.long_prompt``.

A real ``vllm serve`` with positions that roll takes it in by chunks, in constant memory, and
answers. The model is a Llama of two layers and random weights: this is about the plumbing.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.record import append_rows, machine_name
from benchmarks.soak.server import PAGE, VOCABULARY, Server, write_model

TIMEOUT = 3600


def complete(server: Server, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """The answer to a prompt of token ids."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        return dict(json.loads(answer.read()))


def resident(server: Server) -> dict[str, int]:
    """MiB that each of its processes holds in memory."""
    found = server.processes().items()
    return {role: process.memory_info().rss >> 20 for role, process in found}


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One long prompt, after a short one to warm up.

    Args:
        folder: for the model and the server's log.
        arguments: of :func:`parse`.

    """
    write_model(folder / "model", arguments.trained)
    policy = {"budget": arguments.cache, "eviction": "chunk", "positions": "rolling"}
    pages = 2 * arguments.cache // PAGE
    flags = [
        "--dtype=float32",
        "--enforce-eager",
        "--max-num-seqs=1",
        f"--block-size={PAGE}",
        f"--max-model-len={arguments.max_model_len}",
        f"--max-num-batched-tokens={arguments.chunk}",
        f"--num-gpu-blocks-override={pages + 1}",  # and the null page
        f"--kv-policy={arguments.policy}",
        f"--kv-policy-config={json.dumps(policy)}",
    ]
    draw = random.Random(0)
    prompt = [draw.randrange(VOCABULARY) for _ in range(arguments.tokens)]
    with Server(folder / "model", folder / "log", flags) as server:
        complete(server, prompt[: 2 * arguments.trained], 2)
        before, start = resident(server), time.perf_counter()
        usage = complete(server, prompt, arguments.max_tokens)["usage"]
        seconds, after = time.perf_counter() - start, resident(server)
        evicted = server.metric("vllm:kv_policy_evicted_tokens_total")
    return {
        "machine": machine_name(),
        "by": f"vllm serve {version('vllm')}, float32",
        "model": "Llama of 2 layers, random weights",
        "policy": arguments.policy,
        "cache": arguments.cache,
        "chunk": arguments.chunk,
        "trained": arguments.trained,
        "max_model_len": arguments.max_model_len,
        "pool_tokens": pages * PAGE,
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "evicted_tokens": int(evicted),
        "seconds": round(seconds, 1),
        "tokens_per_s": round(usage["prompt_tokens"] / seconds),
        **{f"{role}_mib_before": before[role] for role in before},
        **{f"{role}_mib_after": after[role] for role in before},
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_048_576, help="of the prompt")
    parser.add_argument("--max-tokens", type=int, default=16, help="of the answer")
    parser.add_argument("--max-model-len", type=int, default=1_048_600)
    parser.add_argument("--trained", type=int, default=4096, help="the model's own positions")
    parser.add_argument("--policy", default="streaming")
    parser.add_argument("--cache", type=int, default=1024, help="slots; the pool has twice as many")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--csv", type=Path)
    return parser.parse_args(argv)


def main() -> None:
    """Measure, print, and append to the CSV."""
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder:
        row = measure(Path(folder), arguments)
    print(*(f"{key}={value}" for key, value in list(row.items())[3:]))
    if arguments.csv:
        append_rows(arguments.csv, [row])


if __name__ == "__main__":
    main()
