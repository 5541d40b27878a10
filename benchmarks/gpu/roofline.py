# SPDX-License-Identifier: Apache-2.0
"""Predict what a device takes, by bytes, launches and occupancy, before it is measured.

Usage::

    python -m benchmarks.gpu.roofline [--device H100] [--csv FILE]

The model is small on purpose. A kernel takes the time of its bytes at the rate of a copy, stretched
by the last wave of programs that does not fill the device; or that of its longest program, if that
is more; and what a launch in a graph takes. Constants are estimates; figures of kernels (registers,
shared memory) are the compiler's, see :data:`KERNELS`. Where a measurement is off by more than a
third, the model is wrong or the kernel is: either is worth knowing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import append_rows
from vllm_h2o.kernels.triton.sizes import (
    PAGE_LANES,
    decode_tile,
    num_splits,
    programs_per_processor,
)

COPY = 0.92
"""Share of the memory's rate that a copy reaches."""
LAUNCH = 2.0e-6
"""Seconds from one kernel of a graph to the next that waits for it."""
LOAD = 0.6e-6
"""Seconds of a load that others wait for: what a field, a block id or a page takes to come."""
SCORE_TILE = 1.1e-6
"""Seconds in which a program scores 512 slots: loads of logits, scores and positions, one after the
other."""
MATRIX = 0.55
"""Share of the matrix units' rate that attention over a prompt reaches."""
REGISTERS, WARPS, PROGRAMS = 65536, 64, 32
"""Limits of a multiprocessor: 32-bit registers, and the most warps and programs at once."""


@dataclass(frozen=True)
class Device:
    """A GPU, from its data sheet.

    Args:
        name: short.
        capability: 90 for 9.0.
        processors: streaming multiprocessors.
        bytes_per_s: of its memory.
        flops: of its matrix units, 16-bit, dense.
        shared: bytes of shared memory of a multiprocessor.

    """

    name: str
    capability: int
    processors: int
    bytes_per_s: float
    flops: float
    shared: int

    def programs(self, kernel: Kernel) -> int:
        """Programs of a kernel that run at once."""
        per_program = math.ceil(kernel.registers / 8) * 8 * 32 * kernel.warps
        limits = (
            REGISTERS // per_program,
            self.shared // (kernel.shared + 1024),
            WARPS // kernel.warps,
            PROGRAMS,
        )
        return self.processors * max(min(limits), 1)

    def seconds(self, kernel: Kernel, programs: int, num_bytes: float, longest: float) -> float:
        """Seconds of one launch.

        Args:
            kernel: its needs.
            programs: how many it is launched with.
            num_bytes: that all of them read and write.
            longest: seconds of one program alone.

        """
        at_once = self.programs(kernel)
        waves = programs / at_once
        tail = math.ceil(waves) / waves if waves > 1 else 1.0
        moved = num_bytes / (COPY * self.bytes_per_s) * tail
        return LAUNCH + max(moved + LOAD, math.ceil(waves) * longest)


@dataclass(frozen=True)
class Kernel:
    """One kernel as compiled.

    Args:
        registers: of a thread.
        shared: bytes of a program.
        warps: of a program.

    """

    registers: int
    shared: int
    warps: int = 4


DEVICES = {
    device.name: device
    for device in (
        Device("H200", 90, 132, 4.8e12, 989e12, 228 << 10),
        Device("H100", 90, 132, 3.35e12, 989e12, 228 << 10),
        Device("A100-80GB", 80, 108, 2.04e12, 312e12, 164 << 10),
        Device("L4", 89, 58, 0.30e12, 121e12, 100 << 10),
    )
}
"""By name. None before Ampere: what the compiler makes of the kernels there is another thing."""


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

KERNELS: Mapping[tuple[str, bool], Kernel] = {
    ("attend_split", False): Kernel(128, 33408),
    ("attend_split", True): Kernel(128, 41472),
    ("merge_and_score", False): Kernel(56, 2048),
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

    """

    attend: float
    score: float
    least: float

    @property
    def total(self) -> float:
        """Seconds of both launches."""
        return self.attend + self.score

    @property
    def share(self) -> float:
        """Share of a copy's rate that is reached."""
        return self.least / self.total


def decode(device: Device, shape: Shape, batch: int, slots: int, scores: bool = True) -> Decode:
    """Predict one layer's step; without ``scores`` nothing is scored and no victim chosen."""
    strips, grouped = batch * shape.num_kv_heads, shape.is_grouped
    cached = strips * slots * 4 * shape.head_size
    at_once = programs_per_processor(shape.head_size, 2, device.shared) * device.processors
    splits = num_splits(at_once, strips, slots)
    tiles = math.ceil(slots / splits / decode_tile(shape.head_size, 2, shape.group))
    logits = 4 * strips * slots * shape.group if scores else 0
    words = 12 * strips * slots if scores else 0  # scores twice, positions once
    parts = min(splits, math.ceil(slots / PAGE_LANES))
    serial = math.ceil(slots / PAGE_LANES / parts) * SCORE_TILE if scores else 0.0
    # Candidates are left, counted and read by the last.
    elect = 3 * LOAD if scores and parts > 1 else 0.0
    # The program that stores the new token loads it, its row and its slot before it waits.
    attend = device.seconds(
        KERNELS["attend_split", grouped], strips * splits, cached + logits, (6 + tiles) * LOAD
    )
    score = device.seconds(
        KERNELS["merge_and_score", grouped],
        strips * parts,
        logits + words,
        4 * LOAD + math.ceil(shape.group / parts) * LOAD + serial + elect,
    )
    least = (cached + 8 * strips * slots) / (COPY * device.bytes_per_s)
    return Decode(attend, score, least)


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


def step(device: Device, shape: Shape, batch: int, slots: int, scores: bool = True) -> float:
    """Seconds of a whole step: weights once, attention of each layer, and ten launches more."""
    weights = 2 * shape.parameters
    products = 2 * shape.parameters * batch / (MATRIX * device.flops)
    read = weights / (COPY * device.bytes_per_s)
    attention = decode(device, shape, batch, slots, scores).total
    return max(read, products) + shape.num_layers * (attention + 10 * LAUNCH)


def device_of(name: str) -> Device | None:
    """The one with a name such as a driver gives; None where no data sheet is known."""
    words = name.replace("-", " ").split()
    if {"PCIe", "NVL", "40GB"} & set(words):  # slower memory under the same name
        return None
    return next((d for key, d in DEVICES.items() if key.split("-")[0] in words), None)


def rows(device: Device) -> Iterator[dict[str, Any]]:
    """All that is predicted of a device, a figure a row."""
    for shape in SHAPES:
        for batch in BATCHES:
            for slots in SLOTS:
                found = decode(device, shape, batch, slots)
                plain = decode(device, shape, batch, slots, scores=False)
                where = {"device": device.name, "shape": shape.name, "batch": batch, "size": slots}
                yield {**where, "figure": "decode_ms", "predicted": 1e3 * found.total}
                yield {**where, "figure": "decode_of_copy", "predicted": found.share}
                added = found.total / plain.total - 1
                yield {**where, "figure": "decode_scoring_adds", "predicted": added}
                yield {
                    **where,
                    "figure": "step_ms",
                    "predicted": 1e3 * step(device, shape, batch, slots),
                }
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


def table(device: Device) -> str:
    """Share of a copy's rate that decoding reaches, batch by batch."""
    batches = " / ".join(map(str, BATCHES))
    lines = [f"{device.name}: decode, share of a copy's rate at batch {batches}"]
    for shape in SHAPES:
        for slots in SLOTS:
            shares = (decode(device, shape, batch, slots).share for batch in BATCHES)
            percent = " / ".join(f"{100 * share:.0f}" for share in shares)
            lines.append(f"  {shape.name:8} {slots:5} slots: {percent} %")
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
