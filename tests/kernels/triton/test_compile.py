# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles to machine code for GPUs from Turing to Blackwell. Needs no GPU."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import triton

from benchmarks.gpu import mlp
from benchmarks.gpu.compiled import SHAPES, name_of
from benchmarks.gpu.devices import Kernel
from benchmarks.gpu.roofline import KERNELS
from tests.house_rules import ROOT

pytestmark = pytest.mark.slow

SHARED_MEMORY = {75: 64, 80: 163, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB that a program may have, by compute capability."""
TABLE = ROOT / "benchmarks" / "results" / "gpu-compiled.csv"
"""Registers of a thread, bytes of them that do not fit, and shared memory of a program, at most, of
any shape, as the Triton that vLLM brings compiles it. After a change of a kernel, or of Triton,
``python -m benchmarks.gpu.compiled CAPABILITY --csv FILE`` writes it again."""
MULTIPLIES = ("attend", "column_scores", "estimate", "add_rows", "multiply")
"""Kernels that have matrix units multiply, where what comes is of 16 bits."""
LOADS_AHEAD = ("attend_split", "estimate", "add_rows", "multiply")
"""Kernels whose next loads are on their way while they compute."""


def in_table(capability: int) -> dict[str, dict[str, str]]:
    """Rows of the table by kernel, for this Triton."""
    with TABLE.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["triton"] == triton.__version__]
    assert rows, f"{TABLE} has no rows for Triton {triton.__version__}: see tools/setup_venv.sh"
    return {row["kernel"]: row for row in rows if row["capability"] == str(capability)}


@pytest.mark.parametrize("capability", SHAPES)
def test_every_kernel_compiles_within_limits(capability: int) -> None:
    """All shapes and types, within what a program may have, and as the launches want it."""
    # Compiled kernels and interpreted ones do not go together in one process.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.compiled", str(capability)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    made: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({kernel["kernel"] for kernel in made}) == 17
    table = in_table(capability)
    assert set(table) == set(map(name_of, made))
    for kernel in made:
        assert kernel["shared"] <= SHARED_MEMORY[capability] << 10, kernel
        for figure in ("registers", "spilled", "shared"):
            assert kernel[figure] <= int(table[name_of(kernel)][figure]), kernel
        if capability >= 80 and kernel["kernel"] in LOADS_AHEAD:
            assert kernel["loads_ahead"] > 0, kernel
        # For Turing Triton has no matrix units any more.
        half = capability >= 80 and kernel["dtype"] != "*fp32"
        if half and kernel["kernel"] in MULTIPLIES:
            assert kernel["products"] > 0, kernel
    served = {
        (kernel["kernel"], kernel["group"] > 1): Kernel(
            kernel["registers"], kernel["shared"], kernel["warps"]
        )
        for kernel in made
        if "served" in kernel
    }
    if capability == 90:
        assert served == {**KERNELS, **{(name, True): k for name, k in mlp.KERNELS.items()}}
