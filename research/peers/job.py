# SPDX-License-Identifier: Apache-2.0
"""A worker's job and its result, as JSON files. Imports nothing but the standard library.

A worker is a module of this folder that runs in the environment of its engine::

    python -m research.peers.with_openvino JOB RESULT
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BLOCK_SIZE = 32
"""Tokens of a page; OpenVINO's on CPUs, and the least of stock vLLM there."""


@dataclass(frozen=True)
class Job:
    """Requests that are all there at the start, answered greedily.

    Args:
        folder: of the model, in the engine's form.
        prompts: token ids of each.
        output_len: tokens generated for each, neither more nor fewer.
        pool_bytes: of K, V and whatever the policy keeps with them; the pool's size.
        bytes_per_token: of K and V, over all layers and KV heads.
        max_num_seqs: sequences at once at most.
        options: of the engine.
        budgets: slots of each prompt's sequence; None: the engine's own.

    """

    folder: str
    prompts: Sequence[Sequence[int]]
    output_len: int
    pool_bytes: int
    bytes_per_token: int
    max_num_seqs: int
    options: dict[str, Any]
    budgets: Sequence[int] | None = None

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)))


@dataclass(frozen=True)
class Result:
    """The outcome of a job.

    Args:
        versions: of the engine and what it computes with.
        tokens: generated, by request.
        seconds: from the first request to the last token.
        processor_seconds: likewise, of all processes of the engine: on one core that others use,
            too, what it would have taken alone.
        mean_sequences: that got a token, over the steps in which any did.
        peak_sequences: at once.
        preempted: sequences that were thrown out and computed again; -1: the engine does not say.
        peak_bytes: of the pool, most that were held.

    """

    versions: str
    tokens: list[list[int]]
    seconds: float
    processor_seconds: float
    mean_sequences: float
    peak_sequences: int
    preempted: int
    peak_bytes: int

    @classmethod
    def read(cls, path: Path) -> Result:
        """From JSON."""
        return cls(**json.loads(path.read_text()))


def work(run: Callable[[Job], Result]) -> None:
    """Be a worker: do the job that the command line names, and write what came of it."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(asdict(run(job))))


@dataclass
class Stopwatch:
    """Seconds since it was made.

    Args:
        wall: on the clock.
        processor: of this process and those that it started, where they still run.

    """

    wall: float = field(default_factory=time.perf_counter)
    processor: float = field(default_factory=lambda: processor_seconds())

    def read(self) -> tuple[float, float]:
        """Return seconds of both kinds."""
        return time.perf_counter() - self.wall, processor_seconds() - self.processor


def processor_seconds() -> float:
    """Processor seconds of this process and its running children."""
    parents, used = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        parents[int(path.parent.name)] = int(fields[1])
        used[int(path.parent.name)] = int(fields[11]) + int(fields[12])
    members: set[int] = set()
    found = {os.getpid()}
    while found:
        members |= found
        found = {p for p, parent in parents.items() if parent in members} - members
    return sum(used.get(p, 0) for p in members) / os.sysconf("SC_CLK_TCK")


def widths(steps: Sequence[int]) -> tuple[float, int]:
    """Mean and most of sequences that got a token, over the steps in which any did."""
    busy = [width for width in steps if width]
    return (sum(busy) / len(busy), max(busy)) if busy else (0.0, 0)
