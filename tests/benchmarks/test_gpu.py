"""What a GPU has to prove, proven of itself: its checks run here, interpreted, at small sizes."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

from benchmarks.gpu import kernels
from benchmarks.gpu.__main__ import Check, Report, apart, check_kernels, holds
from vllm_h2o.kernels.triton.kernels import TritonKernels

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", kernels.SMALL, ids=str)
def test_kernels_hold(size: kernels.Size) -> None:
    """Decode, prompts, a second pass and packing."""
    checks = list(check_kernels(CPU, size))
    assert len(checks) == 18 and all(map(holds, checks))


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does nothing fails the outputs, the scores and the positions."""
    monkeypatch.setattr(TritonKernels, "decode", lambda *_: None)
    failed = [check[0] for check in kernels.check_decode(kernels.SMALL[0], CPU) if not holds(check)]
    assert failed[:3] == ["output", "score, relative", "positions that differ"]


def test_a_check_that_raises_fails_alone(tmp_path: Path) -> None:
    """Those before it are kept, and those after it still run."""

    def breaks() -> Iterator[Check]:
        yield "a", 0.0, 0.0
        raise OutOfResources(409600, 232448, "shared memory")

    report = Report("m", tmp_path)
    report.run("first", breaks)
    report.run("second", lambda: [("b", math.nan, 1.0)])
    with (tmp_path / "gpu-checks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["what"] for row in rows] == ["a", "first: OutOfResources", "b"]
    assert [row["holds"] for row in rows] == ["1", "0", "0"]


def test_apart() -> None:
    """What follows the first difference counts, be it alike or not."""
    assert apart([[1, 2, 3, 4], [5, 6]], [[1, 9, 3, 4], [5, 6]]) == 0.375
