# SPDX-License-Identifier: Apache-2.0
"""The native CPU kernels and vLLM's own, on the same shapes: see README.md in this folder."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from vllm import _custom_ops as ops

from benchmarks.record import append_rows, machine_name
from vllm_h2o.kernels.batch import (
    DECODE_FIELDS,
    DecodeBatch,
    PromptChunk,
    Scoring,
    StepTensors,
)
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.native import loader
from vllm_h2o.kernels.native.kernels import NativeKernels
from vllm_h2o.policy import Ranking
from vllm_h2o.policy.h2o import H2O
from vllm_h2o.policy.h2o2 import H2O2

Call = Callable[[], object]
BLOCK_SIZE, DTYPE = 32, torch.bfloat16
COLD_BYTES = 400 << 20
"""K and V of all copies of a batch together: more than second-level caches hold."""
MAX_COPIES = 48


@dataclass(frozen=True)
class Shape:
    """Heads of a layer."""

    model: str
    num_heads: int
    num_kv_heads: int
    head_size: int

    def kv_bytes(self, num_slots: int) -> int:
        """Bytes of K and V in so many slots."""
        return num_slots * self.num_kv_heads * 2 * self.head_size * DTYPE.itemsize


SHAPES = (Shape("SmolLM2-135M", 9, 3, 64), Shape("Llama-3.2-1B", 32, 8, 64))
DECODES = ((1, 512), (1, 2048), (1, 8192), (8, 512), (8, 2048), (8, 4096), (32, 1024))
PROMPTS = (128, 512, 2048, 4096)
RANKINGS = {"prompt": H2O.ranking, "combined": H2O2.ranking}
"""Rankings whose scoring of prompts is timed, by the name in tables."""
KINDS = ("decode", *RANKINGS)


def block_tables(batch: int, length: int) -> torch.Tensor:
    """[B, P]: pages of a pool in random order; page 0 is nobody's."""
    width = -(-length // BLOCK_SIZE)
    return (1 + torch.randperm(batch * width)).to(torch.int32).view(batch, width)


def tokens(shape: Shape, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as a model makes them: parts of one tensor."""
    heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    whole = torch.randn(number, sum(heads), shape.head_size).to(DTYPE)
    query, key, value = whole.split(heads, 1)
    return query, key, value


def step_tensors(shape: Shape, number: int) -> StepTensors:
    """Make the tensors of a step with ``number`` tokens."""
    query, key, value = tokens(shape, number)
    out = torch.empty(query.shape, dtype=DTYPE)
    return StepTensors(query, key, value, out, shape.head_size**-0.5)


def filled_cache(shape: Shape, num_blocks: int) -> LayerCache:
    """A layer's pages; the same numbers in each."""
    content = 2 * shape.head_size + 8 // DTYPE.itemsize
    kv_cache = torch.zeros(num_blocks, shape.num_kv_heads, BLOCK_SIZE, content, dtype=DTYPE)
    cache = LayerCache.of(kv_cache, shape.head_size)
    for view in (cache.key, cache.value):
        view.copy_(torch.randn(view.shape[1:]))
    return cache


def our_decode(kernels: NativeKernels, shape: Shape, batch: int, length: int) -> Call:
    """One new token for each of a batch of full requests."""
    block_table = block_tables(batch, length)
    cache = filled_cache(shape, block_table.numel() + 1)
    values = {
        "token": list(range(batch)),
        **dict.fromkeys(("attended_len", "logical_start"), [length] * batch),
        **dict.fromkeys(("selects", "scores"), [1] * batch),
        "recent_start": [length // 2] * batch,
    }
    fields = torch.tensor([values.get(name, [0] * batch) for name in DECODE_FIELDS])
    requests = DecodeBatch(block_table, fields)
    victims = torch.zeros(cache.num_blocks, shape.num_kv_heads, dtype=torch.int32)
    tensors = step_tensors(shape, batch)
    return lambda: kernels.decode(cache, requests, victims, tensors, Scoring())


def our_prompt(kernels: NativeKernels, shape: Shape, length: int, ranking: Ranking) -> Call:
    """A whole prompt, and each term of its scores."""
    block_table = block_tables(1, length)
    cache = filled_cache(shape, block_table.numel() + 1)
    chunk = PromptChunk(
        tokens=slice(0, length),
        block_table=block_table[0],
        resident_start=0,
        logical_start=0,
        first_window_query=length - 32,
    )
    tensors = step_tensors(shape, length)

    def call() -> None:
        kernels.prefill(cache, [chunk], tensors, Scoring.of(ranking))
        for term in ranking.passes:
            blocks = chunk.in_blocks(term, BLOCK_SIZE)
            kernels.score_term(cache, blocks, tensors, term, ranking.by_age)

    return call


def stock(shape: Shape, batch: int, length: int, num_queries: int) -> Call:
    """vLLM's attention, and the writing of K and V that goes before it."""
    isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    block_table = block_tables(batch, length)
    blocks = block_table.numel() + 1
    cache = torch.randn(blocks, shape.num_kv_heads, 2 * BLOCK_SIZE, shape.head_size).to(DTYPE)
    key_cache, value_cache = cache.chunk(2, dim=2)
    query, key, value = tokens(shape, batch * num_queries)
    out = torch.empty(query.shape, dtype=DTYPE)
    starts = torch.arange(batch + 1, dtype=torch.int32) * num_queries
    lengths = torch.full((batch,), length, dtype=torch.int32)
    slot = torch.arange(length - num_queries, length)
    mapping = block_table[:, slot // BLOCK_SIZE].long() * BLOCK_SIZE + slot % BLOCK_SIZE
    mapping = mapping.flatten()
    heads = {
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
    }
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=batch,
        **heads,
        seq_lens=lengths,
        dtype=DTYPE,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )

    def run() -> None:
        ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, mapping, isa)
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            output=out,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=shape.head_size**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=block_table,
            softcap=0.0,
            scheduler_metadata=metadata,
            s_aux=None,
        )

    return run


def seconds(call: Call) -> float:
    """Time one call; on one thread by processor time, which excludes other processes."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    call()
    return clock() - start


@dataclass(frozen=True)
class Pairs:
    """Times of two calls in alternation.

    Args:
        ours: seconds.
        theirs: seconds, of the call right after.

    """

    ours: Sequence[float]
    theirs: Sequence[float]

    def figures(self, num_calls: int) -> dict[str, float]:
        """Medians for one call of several, the median ratio, and the quartiles around it."""
        ratios = [a / b for a, b in zip(self.ours, self.theirs, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        return {
            "ours_us": round(statistics.median(self.ours) / num_calls * 1e6, 1),
            "stock_us": round(statistics.median(self.theirs) / num_calls * 1e6, 1),
            "ratio": round(middle, 3),
            "ratio_low": round(low, 3),
            "ratio_high": round(high, 3),
        }


def alternate(ours: Sequence[Call], theirs: Sequence[Call], budget: float) -> Pairs:
    """Call all of one side, then all of the other, until the time is up."""

    def of(calls: Sequence[Call]) -> float:
        return seconds(lambda: [call() for call in calls])

    of(ours), of(theirs)
    pairs: list[tuple[float, float]] = []
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(pairs) < 7:
        pairs.append((of(ours), of(theirs)))
    return Pairs([a for a, _ in pairs], [b for _, b in pairs])


def memcpy_rate(budget: float) -> float:
    """Bytes read and written in a second, when a block larger than caches is copied."""
    source = torch.ones(COLD_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    times: list[float] = []
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(times) < 5:
        times.append(seconds(lambda: target.copy_(source)))
    return 2 * COLD_BYTES / statistics.median(times)


def decode_row(
    kernels: NativeKernels, budget: float, shape: Shape, batch: int, length: int
) -> dict[str, Any]:
    """One step of a batch, its caches out of reach of the second-level cache."""
    moved = shape.kv_bytes(batch * length)
    copies = max(2, min(MAX_COPIES, COLD_BYTES // moved))
    ours = [our_decode(kernels, shape, batch, length) for _ in range(copies)]
    theirs = [stock(shape, batch, length, 1) for _ in range(copies)]
    # The ceiling of the same minute: other work on the machine slows both.
    ceiling = memcpy_rate(budget / 4)
    figures = alternate(ours, theirs, budget).figures(copies)
    rate = moved / figures["ours_us"] * 1e6
    what = {"kernel": "decode", "model": shape.model, "batch": batch, "length": length}
    rates = {"gb_per_s": rate / 1e9, "memcpy_gb_per_s": ceiling / 1e9}
    rates |= {"of_memcpy": rate / ceiling, "tflop_per_s": 0.0}
    return what | figures | {name: round(x, 3) for name, x in rates.items()}


def prompt_row(
    kernels: NativeKernels, budget: float, shape: Shape, length: int, kind: str
) -> dict[str, Any]:
    """A whole prompt, attended to and scored."""
    ranking = RANKINGS[kind]
    ours = [our_prompt(kernels, shape, length, ranking)]
    figures = alternate(ours, [stock(shape, 1, length, length)], budget).figures(1)
    passes = 2 if ranking.term("rotated") else 1
    flop = 2 * passes * length * length * shape.num_heads * shape.head_size
    what = {"kernel": kind, "model": shape.model}
    rates = {"gb_per_s": 0.0, "memcpy_gb_per_s": 0.0, "of_memcpy": 0.0}
    rates["tflop_per_s"] = round(flop / figures["ours_us"] / 1e6, 3)
    return what | {"batch": 1, "length": length} | figures | rates


def rows(
    kernels: NativeKernels, budget: float, quick: bool, only: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A row for each shape, kernel and length."""
    for shape in SHAPES[: 1 if quick else None]:
        if "decode" in only:
            for batch, length in DECODES[: 1 if quick else None]:
                yield decode_row(kernels, budget, shape, batch, length)
        for kind in RANKINGS:
            for length in PROMPTS[: 1 if quick else None] if kind in only else ():
                yield prompt_row(kernels, budget, shape, length, kind)


def main() -> None:
    """Measure, print and append to the CSV."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    parser.add_argument("--threads", type=int, default=1, help="threads of both sides")
    parser.add_argument("--variant", choices=loader.available(), help="instead of the best")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each row")
    parser.add_argument("--quick", action="store_true", help="the first row of each kind alone")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    kernels = loader.load(args.variant)
    machine = {
        "machine": machine_name(),
        "vllm": version("vllm"),
        "variant": kernels.variant,
        "threads": args.threads,
    }
    for row in rows(kernels, 0.1 if args.quick else args.seconds, args.quick, args.only):
        print(row, flush=True)
        if args.csv:
            append_rows(args.csv, [machine | row])


if __name__ == "__main__":
    main()
