# SPDX-License-Identifier: Apache-2.0
"""Survivors of a prompt that one engine has read travel to another: bytes, and time.

The first engine keeps the cache of a prompt in a file, and the second one generates from there. It
is compared with stock vLLM, which computes the prompt. A file in memory stands for the wire: a real
one adds the time of the bytes. The sides take turns.

Usage::

    python -m benchmarks.throughput.travel [--rounds 3] [--lengths 1024 2048 4096] [--share 0.2]
        [--csv FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt

from benchmarks.quality.forced import BLOCK_SIZE, forced_engine
from benchmarks.record import append_rows, machine_name
from benchmarks.smollm2 import MODEL, model_dir
from benchmarks.throughput.runs import ENVIRONMENT, ON_CPU

DTYPE = "float32"
STOCK, OURS = "stock vLLM", "h2o"
SIDES = (STOCK, OURS)
WIRE = Path("/dev/shm")


def generate(llm: LLM, prompt: list[int], **extra_args: Any) -> tuple[int, int, float]:
    """One token, how many of the prompt's were not computed, and the seconds that it took."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, extra_args=extra_args)
    begun = time.perf_counter()
    text = TokensPrompt(prompt_token_ids=prompt)
    (output,) = llm.generate([text], params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    return output.outputs[0].token_ids[0], output.num_cached_tokens or 0, seconds


def engine(model: Path, longest: int, folder: str | None) -> Any:
    """Stock vLLM's, or one of h2o that shares a folder."""
    options = {"continuation": folder} if folder else None
    return forced_engine(
        str(model), OURS if folder else None, options, longest, max_num_batched_tokens=2048
    )


def rows_of(side: str, model: Path, prompts: Sequence[list[int]], share: float) -> list[Any]:
    """One row for each prompt.

    Args:
        side: of :data:`SIDES`.
        model: its folder.
        prompts: of several lengths.
        share: of a prompt that is kept.

    """
    longest = max(map(len, prompts)) + 2 * BLOCK_SIZE
    warm, rows = prompts[0][:BLOCK_SIZE][::-1], []
    with TemporaryDirectory(dir=WIRE if WIRE.is_dir() else None) as folder:
        kept: list[tuple[list[int], int, int]] = []
        if side == OURS:
            with engine(model, longest, folder) as llm:
                for prompt in prompts:
                    budget = BLOCK_SIZE * round(share * len(prompt) / BLOCK_SIZE)
                    before = num_bytes(folder)
                    token, *_ = generate(llm, prompt, kv_budget=budget, kv_save=1)
                    kept.append(([*prompt, token], budget, num_bytes(folder) - before))
        with engine(model, longest, folder if side == OURS else None) as llm:
            generate(llm, warm)
            for prompt, budget, size in kept or [(prompt, 0, 0) for prompt in prompts]:
                asked = {"kv_budget": budget} if budget else {}
                _, found, seconds = generate(llm, prompt, **asked)
                length = len(prompt) - (side == OURS)
                whole = length * token_bytes(model)
                rows.append({"side": side, "length": length, "budget": budget, "found": found})
                rows[-1] |= {"bytes": size or whole, "share": round((size or whole) / whole, 3)}
                rows[-1] |= {"seconds": round(seconds, 3)}
    return rows


def token_bytes(model: Path) -> int:
    """Bytes of K and V of a token, in float32, as stock vLLM keeps them."""
    config = json.loads((model / "config.json").read_text())
    each = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return 2 * 4 * int(each)


def num_bytes(folder: str) -> int:
    """Bytes of all files of a folder."""
    return sum(path.stat().st_size for path in Path(folder).iterdir())


def rows(rounds: int, lengths: Sequence[int], share: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of each engine: the sides take turns, and another one begins each round."""
    model = model_dir(DTYPE)
    for number in range(rounds):
        draw = random.Random(number)
        prompts = [[draw.randrange(49152) for _ in range(length)] for length in lengths]
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            about = {"machine": machine_name(), "vllm": version("vllm"), "model": MODEL}
            for row in rows_of(side, model, prompts, share):
                yield {"round": number, **about, "dtype": DTYPE, **row}


def main() -> None:
    """Measure, print, append to the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="engines of each side (3)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--share", type=float, default=0.2, help="that is kept (0.2)")
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    args = parser.parse_args()
    os.environ.update({**ENVIRONMENT, **ON_CPU})
    print("| side | prompt | bytes | of all | seconds |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for row in rows(args.rounds, args.lengths, args.share):
        shown = (row[name] for name in ("side", "length", "bytes", "share", "seconds"))
        print(f"| {' | '.join(map(str, shown))} |", flush=True)
        if args.csv:
            append_rows(args.csv, [row])


if __name__ == "__main__":
    main()
