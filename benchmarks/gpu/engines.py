# SPDX-License-Identifier: Apache-2.0
"""Checks of whole engines, each in a process of its own: tokens, memory, what is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import LENGTHS, MAX_MODEL_LEN

ROOT = Path(__file__).parents[2]
Check = tuple[str, float, float]
"""A name, the figure, and its maximum."""
WHOLE, EVICTING = ("--policy-budget", "1.0"), ("--policy-budget", "0.125")
PREFIXES = (*EVICTING, "--policy", "snapkv", "--prefixes")
PAGES = (*EVICTING, "--pages")
COMBINED = (*EVICTING, "--policy", "h2o2")
SECOND_READING = (*COMBINED, "--score", "reconstruction")
COMPARED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "100 % against stock": ((), WHOLE),
    "1/8, graphs against eager": (EVICTING, (*EVICTING, "--eager")),
    "1/8, nothing compiled while it serves": (EVICTING, (*EVICTING, "--strict")),
    "1/8, shared prefixes, graphs against eager": ((*PREFIXES, "--strict"), (*PREFIXES, "--eager")),
    "1/8, V2 against V1": (EVICTING, (*EVICTING, "--v1")),
    "1/8, whole pages, graphs against eager": ((*PAGES, "--strict"), (*PAGES, "--eager")),
    "1/8, h2o2, graphs against eager": (COMBINED, (*COMBINED, "--eager")),
    "1/8, read twice, graphs against eager": (
        (*SECOND_READING, "--strict"),
        (*SECOND_READING, "--eager"),
    ),
}
"""Pairs of engines whose tokens are compared, by their options."""


def found_by(logs: Path, module: str, *options: str) -> dict[str, Any]:
    """Run one engine in a process of its own and return its figures; its log goes to ``logs``."""
    log = logs / f"{'_'.join([module, *(option.strip('-') for option in options)])}.log"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", f"benchmarks.gpu.{module}", str(out), *options]
        # An interpreter of Triton is for the kernels' check alone.
        environment = {**os.environ, "TRITON_INTERPRET": "0"}
        with log.open("w") as said:
            done = subprocess.run(command, cwd=ROOT, env=environment, stdout=said, stderr=said)
        if done.returncode:
            raise RuntimeError(f"{command} failed, see {log}:\n{log.read_text()[-4000:]}")
        return dict(json.loads(out.read_text()))


def apart(one: list[list[int]], other: list[list[int]]) -> float:
    """The fraction of tokens that follow the first difference, mean over requests."""
    fractions = []
    for a, b in zip(one, other, strict=True):
        same = next((i for i in range(len(a)) if a[i] != b[i]), len(a))
        fractions.append(1 - same / len(a))
    return sum(fractions) / len(fractions)


def size_of(small: bool) -> tuple[str, ...]:
    """Options of an engine for a CPU, which compiles each layer for itself."""
    sizes = ("--layers", "2", "--requests", "4", "--tokens", "12", "--dtype", "float32")
    return sizes if small else ()


def compare(logs: Path, small: bool, shape: str, name: str) -> Iterator[Check]:
    """Tokens of a pair of engines, and the memory that each finds for its pool."""
    sizes = (shape, *size_of(small))
    one, other = (found_by(logs, "engine", *sizes, *options) for options in COMPARED[name])
    # Kernels that round differently in half precision differ at a near tie, sooner or later.
    allowed = 0.0 if small else 0.4
    differ = apart(one["tokens"], other["tokens"])
    yield f"{shape}: {name}: tokens from the first that differs", differ, allowed
    if one["pool_bytes"] is not None:
        less = (one["pool_bytes"] - other["pool_bytes"]) / (1 << 20)
        yield f"{shape}: {name}: MiB that the second finds less for its pool", less, 1024.0


def control(logs: Path, small: bool, shape: str) -> Iterator[Check]:
    """Check that a budget shows in the tokens at all."""
    sizes = (shape, *size_of(small))
    each = (found_by(logs, "engine", *sizes, *options) for options in (WHOLE, EVICTING))
    whole, evicted = (found["tokens"] for found in each)
    long = [i for i in range(len(whole)) if LENGTHS[i % len(LENGTHS)] > MAX_MODEL_LEN / 8]
    same = 1 - apart([whole[i] for i in long], [evicted[i] for i in long])
    yield f"{shape}: control: tokens that 1/8 leaves as they are", same, 0.7


def retained(logs: Path, small: bool, dtype: str) -> Iterator[Check]:
    """Compare what is kept with the reference in a model of float64."""
    sizes = ("--layers", "2", "--prompt", "160", "--tokens", "16") if small else ()
    found = found_by(logs, "retained", "--dtype", dtype, *sizes)
    # Half precision orders tokens of nearly one score otherwise.
    allowed = 1e-3 if dtype == "float32" else 0.02
    what = f"{found['num_sets']} sets in {dtype}: share of tokens that the reference does not keep"
    yield f"retained: {what}", found["differing"], allowed
