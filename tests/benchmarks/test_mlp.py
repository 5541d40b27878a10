# SPDX-License-Identifier: Apache-2.0
"""The MLP by neurons on a GPU: predictions by hand, and the device's checks, interpreted."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import mlp, speed
from benchmarks.gpu.card import Card
from benchmarks.gpu.course import parts
from benchmarks.gpu.devices import COPY, DEVICES, LAUNCH, Device
from benchmarks.gpu.expected import of_mlp
from benchmarks.gpu.report import Report, holds
from tests.benchmarks.standin import standing_in
from vllm_h2o.kernels.triton.neurons import TritonNeurons

CPU, H100 = torch.device("cpu"), Card("NVIDIA H100 80GB HBM3", 90, 85.5)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_mlp_predictions_are_no_faster_than_memory(device: Device) -> None:
    """One token is faster than where all rows are read, by fewer bytes."""
    for tokens in mlp.TOKENS:
        found = mlp.predicted(device, mlp.OPT, tokens)
        for mode in mlp.MODES:
            least = found[f"mlp_{mode}_MB"] * 1e6 / (COPY * device.bytes_per_s)
            assert found[f"mlp_{mode}_ms"] > 1e3 * least
        if tokens == 1:
            dense, exact, predicted = (found[f"mlp_{mode}_MB"] for mode in mlp.MODES)
            assert predicted < exact < dense
            dense, exact, predicted = (found[f"mlp_{mode}_ms"] for mode in mlp.MODES)
            assert max(exact, predicted) < dense


def test_mlp_bytes_are_those_worked_by_hand() -> None:
    """A tenth of the rows of fc2 for one token, a list and partial sums; launches by mode."""
    found = mlp.predicted(DEVICES["H100"], mlp.OPT, 1)
    matrix = 2 * 16384 * 4096
    partial_sums = 2 * 4 * 32 * 4096  # written, and read
    read = matrix / 10 + 2 * 16384 + 4 * 1638.4 + partial_sums
    assert found["mlp_exact_MB"] == pytest.approx((matrix + read) / 1e6)
    whole = matrix / (COPY * 3.35e12) + LAUNCH
    assert found["mlp_dense_ms"] == pytest.approx(2e3 * whole)
    assert [found[f"mlp_{mode}_launches"] for mode in mlp.MODES] == [2, 4, 5]


def test_mlp_predictions_are_in_the_table() -> None:
    """Of the card, by tokens."""
    for tokens in mlp.TOKENS:
        wanted = mlp.predicted(DEVICES["H100"], mlp.OPT, tokens)
        assert of_mlp(H100, mlp.OPT, tokens) == pytest.approx(wanted, rel=1e-3)


def test_mlp_checks_hold() -> None:
    """Rows kept, products, sums and rows read, for one token and for eight."""
    checks = list(mlp.check(mlp.SMALL, torch.float32, CPU))
    assert len(checks) == 8 and all(map(holds, checks)), checks


@pytest.mark.parametrize("name", ["up", "down"])
def test_mlp_checks_of_a_wrong_kernel_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the result is wrong."""
    right = getattr(TritonNeurons, name)
    monkeypatch.setattr(TritonNeurons, name, lambda *given: 2 * right(*given))
    wrong = "products" if name == "up" else "sums"
    failed = [check[0] for check in mlp.check(mlp.SMALL, torch.float32, CPU) if not holds(check)]
    assert failed == [f"mlp of {tokens}: {wrong}, relative" for tokens in mlp.TOKENS]


def test_mlp_parts_run_on_a_device_that_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks with a graph, then times beside their predictions."""
    small = mlp.OPT._replace(neurons=1024, width=128)
    monkeypatch.setattr(mlp, "OPT", small)
    monkeypatch.setattr(speed, "seconds", partial(speed.seconds, repeats=1))
    report = Report(Card(H100.name, 90, 85.5), tmp_path)
    with standing_in():
        found = [part for part in parts(False, False, H100) if "MLP" in part.name]
        assert [part.kind for part in found] == ["kernels", "kernels", "speed"]
        for part in found[1:]:  # the interpreter multiplies no matrices of bfloat16
            report.run(part.name, partial(part.action, report, torch.device("cuda")))
    assert len(report.checks) == 9 and all(map(holds, report.checks)), report.checks
    assert capsys.readouterr().out.count("(predicted") == len(mlp.TOKENS) * len(mlp.MODES)
    assert (tmp_path / "gpu-mlp.csv").read_text().count("\n") == 1 + len(mlp.TOKENS)
