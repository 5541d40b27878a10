# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles to machine code for GPUs from Turing to Hopper. Needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.gpu.roofline import KERNELS
from tests.house_rules import ROOT

pytestmark = pytest.mark.slow

SHARED_MEMORY = {75: 64 << 10, 80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""Bytes that a program may have, by compute capability."""
SPILLED: dict[int, dict[str, int]] = {
    75: {"attend_split": 256},
    80: {
        "attend": 472,
        "attend_split": 24,
        "merge_and_score": 8,
        "column_scores": 32,
        "reached_scores": 208,
    },  # fmt: skip
    89: {"attend": 8, "column_scores": 24, "reached_scores": 288},
    90: {"attend": 48, "attend_split": 48, "reached_scores": 216},
}
"""Bytes at most that do not fit into a thread's registers, of any shape; 0 of other kernels.
``reached_scores`` is ``column_scores`` of a term with reach, which compares all pairs of a tile's
positions. Most others are of float32 and float8, of groups of 7 and 8, and of Turing."""
MULTIPLIES = ("attend", "column_scores")
"""Kernels of prompts, which have matrix units multiply where K is of 16 bits."""


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_kernel_compiles_within_limits(capability: int) -> None:
    """All shapes and types, within what a program may have, and as the launches want it."""
    # Compiled kernels and interpreted ones do not go together in one process.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.compiled", str(capability)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    made: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({kernel["kernel"] for kernel in made}) == 12
    for kernel in made:
        assert kernel["shared"] <= SHARED_MEMORY[capability], kernel
        name = "reached_scores" if kernel["reach"] else kernel["kernel"]
        most = SPILLED[capability].get(name, 0)
        assert kernel["spilled"] <= most, kernel
        if capability >= 80 and kernel["kernel"] == "attend_split":
            assert kernel["loads_ahead"] > 0, kernel
        # For Turing Triton has no matrix units any more.
        half = capability >= 80 and kernel["dtype"] != "*fp32"
        if half and kernel["kernel"] in MULTIPLIES:
            assert kernel["products"] > 0, kernel
    served = {
        (kernel["kernel"], kernel["group"] > 1): [
            kernel[name] for name in ("registers", "shared", "warps")
        ]
        for kernel in made
        if "served" in kernel
    }
    if capability == 90:
        assert served == {key: [k.registers, k.shared, k.warps] for key, k in KERNELS.items()}
