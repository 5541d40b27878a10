"""What a GPU has to prove, proven of itself: its checks run here, interpreted, at small sizes."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import kernels
from benchmarks.gpu.__main__ import check_kernels, report
from vllm_h2o.kernels.triton.kernels import TritonKernels

CPU = torch.device("cpu")


def test_kernels_hold() -> None:
    """Decode, prompts and packing."""
    checks = list(check_kernels(CPU, kernels.SMALL))
    assert len(checks) == 23 and all(report(check) for check in checks)


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does nothing fails the outputs, the scores and the positions."""
    monkeypatch.setattr(TritonKernels, "decode", lambda *_: None)
    failed = [
        check[0] for check in kernels.check_decode(kernels.SMALL[0], CPU) if not report(check)
    ]
    assert failed[:3] == ["output", "score, relative", "positions that differ"]
