# SPDX-License-Identifier: Apache-2.0
"""Predict what a device takes, by bytes, launches and occupancy, before it is measured.

Usage::

    python -m benchmarks.gpu.roofline [--device H100] [--csv FILE]

The model is small on purpose. A kernel takes the time of its bytes at the rate of a copy, stretched
by the last wave of programs that does not fill the device; or that of its longest program, if that
is more; and what a launch in a graph takes. Lengths of a batch may differ. Constants are estimates;
figures of kernels (registers, shared memory) are the compiler's, see :data:`KERNELS`. Where a
measurement is off by more than a third, the model is wrong or the kernel is: either is worth
knowing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import mlp
from benchmarks.gpu.devices import COPY, DEVICES, LAUNCH, LOAD, MATRIX, Device, Kernel
from benchmarks.record import append_rows
from vllm_h2o.kernels.triton.sizes import (
    PAGE_LANES,
    decode_tile,
    num_spare,
    num_splits,
    programs_per_processor,
    splits_of,
)

HELD = 0.5
"""Share of a device's cache that holds what is told to stay: each half of it may keep a copy."""
SCORE_TILE = 1.1e-6
"""Seconds in which a program scores 512 slots: loads of logits, scores and positions, one after the
other."""


@dataclass(frozen=True)
class Shape:
    """A model, as far as attention and memory go.

    Args:
        name: short.
        num_heads: query heads of a layer.
        num_kv_heads: KV heads of a layer.
        head_size: elements of K of one head.
        num_layers: of attention.
        parameters: of all.

    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_layers: int
    parameters: float

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_grouped(self) -> bool:
        """Whether matrix units multiply in a decode step."""
        return self.group > 1


OPT = Shape("OPT-6.7B", 32, 32, 128, 32, 6.7e9)
LLAMA = Shape("8B", 32, 8, 128, 32, 8.0e9)
SHAPES = (OPT, LLAMA)
BATCHES, SLOTS = (1, 8, 64, 256), (512, 2048, 8192)
MIXED = (24576,) + 65 * (1024,)
"""Slots of a batch in which one request is long."""

KERNELS: Mapping[tuple[str, bool], Kernel] = {
    ("attend_split", False): Kernel(128, 33408),
    ("attend_split", True): Kernel(128, 41472),
    ("merge_and_score", False): Kernel(64, 2048),
    ("merge_and_score", True): Kernel(64, 2048),
    ("column_scores", False): Kernel(106, 81920, 8),
    ("column_scores", True): Kernel(114, 81920, 8),
}
"""By name, and whether heads are grouped: 16-bit heads of 128, for 9.0, as
:mod:`benchmarks.gpu.compiled` finds them."""


@dataclass(frozen=True)
class Decode:
    """One layer's decode step, in seconds.

    Args:
        attend: over all slots, after the new token is stored.
        score: splits merged, scores, victims.
        least: K, V, score and position at the rate of a copy.
        scoring_bytes: that scores move in memory, of a slot of a KV head, next to K and V.

    """

    attend: float
    score: float
    least: float
    scoring_bytes: float

    @property
    def total(self) -> float:
        """Seconds of both launches."""
        return self.attend + self.score

    @property
    def share(self) -> float:
        """Share of a copy's rate that is reached."""
        return self.least / self.total


def decode(
    device: Device,
    shape: Shape,
    lengths: Sequence[int],
    scores: bool = True,
    divides: bool = True,
) -> Decode:
    """Predict one layer's step, of a batch whose requests have so many slots.

    Without ``scores`` nothing is scored and no victim chosen; unless it ``divides``, long requests
    have no more splits than short ones.
    """
    grouped, heads, slots = shape.is_grouped, shape.num_kv_heads, shape.num_kv_heads * sum(lengths)
    cached = slots * 4 * shape.head_size
    at_once = programs_per_processor(shape.head_size, 2, device.shared) * device.processors
    each = num_splits(at_once, len(lengths) * heads, max(lengths))
    spare = num_spare(at_once, heads, each, max(lengths)) if divides else 0
    splits = splits_of(lengths, each, spare)
    logits = 4 * slots * shape.group if scores else 0
    if logits <= HELD * device.cache:  # told to stay there, and written over by the next layer
        logits = 0
    words = 12 * slots if scores else 0  # scores twice, positions once
    # Half of the device looks for the splits of long requests; what has them adds three loads.
    look = 3 * LOAD if spare else 0.0
    tile = decode_tile(shape.head_size, 2, shape.group)
    # The program that stores the new token loads it, its row and its slot before it waits.
    attends = [
        (6 + math.ceil(length / num / tile)) * LOAD + look * (num > each)
        for length, num in zip(lengths, splits, strict=True)
    ]
    parts = splits if spare else [min(each, math.ceil(max(lengths) / PAGE_LANES))] * len(lengths)
    merges = []
    for length, num in zip(lengths, parts, strict=True):
        serial = math.ceil(length / PAGE_LANES / num) * SCORE_TILE if scores else 0.0
        # Candidates are left, counted and read by the last.
        elect = 3 * LOAD if scores and num > 1 else 0.0
        own = (4 + math.ceil(shape.group / num)) * LOAD + look * (num > each)
        merges.append(own + serial + elect)
    attend = device.seconds(
        KERNELS["attend_split", grouped],
        heads * _as_longest(attends, splits), cached + logits, max(attends), look / 2,
    )  # fmt: skip
    score = device.seconds(
        KERNELS["merge_and_score", grouped],
        heads * _as_longest(merges, parts), logits + words, max(merges), look / 2,
    )  # fmt: skip
    least = (cached + 8 * slots) / (COPY * device.bytes_per_s)
    return Decode(attend, score, least, (2 * logits + words) / slots)


def _as_longest(seconds: Sequence[float], programs: Sequence[int]) -> float:
    """Programs of all requests, each of which takes so long, if all were as long as the longest."""
    each = zip(seconds, programs, strict=True)
    return sum(one * num for one, num in each) / max(seconds)


@dataclass(frozen=True)
class Prompt:
    """One layer's prompt, in seconds.

    Args:
        attention: FlashAttention.
        scores: of its columns.

    """

    attention: float
    scores: float


def prompt(device: Device, shape: Shape, tokens: int) -> Prompt:
    """Predict one layer's prompt: scores have half of attention's products, and fewer programs."""
    half = shape.num_heads * tokens * tokens * shape.head_size  # causal, of a multiply-add
    attention = 2 * half / (MATRIX * device.flops) + LAUNCH
    kernel = KERNELS["column_scores", shape.is_grouped]
    # One program of eight warps leaves the matrix units idle while it loads and adds.
    fill = min(1.0, device.programs(kernel) / device.processors * kernel.warps / 16)
    # Tiles of 128 keys see queries from their own on: the first sees all, the last few.
    programs = math.ceil(tokens / 128) * shape.num_kv_heads
    balance = max(1.0, 2 * min(1.0, device.programs(kernel) / programs))
    scores = half / (MATRIX * fill * device.flops) * balance + LAUNCH
    return Prompt(attention, scores)


def step(
    device: Device,
    shape: Shape,
    lengths: Sequence[int],
    scores: bool = True,
    divides: bool = True,
) -> float:
    """Seconds of a whole step: weights once, attention of each layer, and ten launches more."""
    weights = 2 * shape.parameters
    products = 2 * shape.parameters * len(lengths) / (MATRIX * device.flops)
    read = weights / (COPY * device.bytes_per_s)
    attention = decode(device, shape, lengths, scores, divides).total
    return max(read, products) + shape.num_layers * (attention + 10 * LAUNCH)


def rows(device: Device) -> Iterator[dict[str, Any]]:
    """All that is predicted of a device, a figure a row."""
    for shape in SHAPES:
        for batch in BATCHES:
            for slots in SLOTS:
                lengths = [slots] * batch
                found = decode(device, shape, lengths)
                plain = decode(device, shape, lengths, scores=False)
                where = {"device": device.name, "shape": shape.name, "batch": batch, "size": slots}
                yield {**where, "figure": "decode_ms", "predicted": 1e3 * found.total}
                yield {**where, "figure": "decode_of_copy", "predicted": found.share}
                added = found.total / plain.total - 1
                yield {**where, "figure": "decode_scoring_adds", "predicted": added}
                yield {**where, "figure": "decode_scoring_bytes", "predicted": found.scoring_bytes}
                yield {
                    **where,
                    "figure": "step_ms",
                    "predicted": 1e3 * step(device, shape, lengths),
                }
        where = {"device": device.name, "shape": shape.name, "batch": len(MIXED)}
        for divides in (True, False):
            name = "mixed" if divides else "mixed_undivided"
            found = decode(device, shape, MIXED, divides=divides)
            milliseconds = 1e3 * step(device, shape, MIXED, divides=divides)
            mixed = {**where, "size": max(MIXED)}
            yield {**mixed, "figure": f"{name}_decode_ms", "predicted": 1e3 * found.total}
            yield {**mixed, "figure": f"{name}_step_ms", "predicted": milliseconds}
        for tokens in (2048, 4096, 32768):
            found_prompt = prompt(device, shape, tokens)
            yield {
                "device": device.name,
                "shape": shape.name,
                "batch": 1,
                "size": tokens,
                "figure": "prompt_scoring_adds",
                "predicted": found_prompt.scores / found_prompt.attention,
            }
    for tokens in mlp.TOKENS:
        where = {"device": device.name, "shape": mlp.OPT.name, "batch": tokens}
        for figure, value in mlp.predicted(device, mlp.OPT, tokens).items():
            yield {**where, "size": mlp.OPT.neurons, "figure": figure, "predicted": value}


def table(device: Device) -> str:
    """Share of a copy's rate that decoding reaches, batch by batch."""
    batches = " / ".join(map(str, BATCHES))
    lines = [f"{device.name}: decode, share of a copy's rate at batch {batches}"]
    for shape in SHAPES:
        for slots in SLOTS:
            shares = (decode(device, shape, [slots] * batch).share for batch in BATCHES)
            percent = " / ".join(f"{100 * share:.0f}" for share in shares)
            lines.append(f"  {shape.name:8} {slots:5} slots: {percent} %")
        divided, whole = (
            1e3 * step(device, shape, MIXED, divides=divides) for divides in (True, False)
        )
        lines.append(
            f"  {shape.name:8} {MIXED[0]} slots and {len(MIXED) - 1} x {MIXED[1]}: "
            f"{divided:.1f} ms a step, {whole:.1f} undivided"
        )
    for tokens in mlp.TOKENS:
        found = mlp.predicted(device, mlp.OPT, tokens)
        each = (f"{mode} {found[f'mlp_{mode}_ms']:.3f}" for mode in mlp.MODES)
        lines.append(f"  {mlp.OPT.name:8} MLP of a layer, {tokens} tokens: {', '.join(each)} ms")
    return "\n".join(lines)


def main() -> None:
    """Print the tables; append to a CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=list(DEVICES), nargs="+", default=list(DEVICES))
    parser.add_argument("--csv", type=Path, help="append the predictions to this file")
    args = parser.parse_args()
    for name in args.device:
        print(table(DEVICES[name]))
        if args.csv:
            found = [{**row, "predicted": f"{row['predicted']:.4g}"} for row in rows(DEVICES[name])]
            append_rows(args.csv, found)


if __name__ == "__main__":
    main()
