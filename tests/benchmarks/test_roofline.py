# SPDX-License-Identifier: Apache-2.0
"""Predictions for devices: no faster than memory, and what is worked by hand."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.gpu import devices, roofline
from benchmarks.gpu.devices import DEVICES, Kernel
from benchmarks.gpu.roofline import BATCHES, LLAMA, MIXED, OPT, SHAPES, SLOTS
from vllm_h2o.kernels.triton.sizes import decode_tile

H100 = DEVICES["H100"]
PREDICTED = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu-predicted.csv"


def test_roofline_counts_programs_at_once() -> None:
    """By registers, by shared memory, by warps, whichever is least."""
    assert H100.programs(Kernel(128, 33408)) == 4 * 132
    assert H100.programs(Kernel(168, 1024)) == 3 * 132
    assert H100.programs(Kernel(32, 100 << 10)) == 2 * 132
    assert H100.programs(Kernel(16, 0)) == 16 * 132


def test_roofline_launch_agrees_with_a_count_by_hand() -> None:
    """One and a half waves take two; a long program takes its own time."""
    kernel = Kernel(128, 0)
    rate = devices.COPY * 3.35e12
    whole = H100.seconds(kernel, 528, rate * 1e-3, 0)
    assert whole == pytest.approx(devices.LAUNCH + 1e-3 + devices.LOAD)
    half_empty = H100.seconds(kernel, 792, rate * 1e-3, 0)
    assert half_empty == pytest.approx(devices.LAUNCH + 1e-3 * 2 / 1.5 + devices.LOAD)
    assert H100.seconds(kernel, 529, 0, 1e-3) == pytest.approx(devices.LAUNCH + 2e-3)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_roofline_decode_is_never_faster_than_memory(device: devices.Device) -> None:
    """More slots reach more of it; scores cost something."""
    for shape in SHAPES:
        for batch in BATCHES:
            found = [roofline.decode(device, shape, [slots] * batch) for slots in SLOTS]
            assert all(0 < one.share < 1 for one in found)
            assert found == sorted(found, key=lambda one: one.total)
            for slots, one in zip(SLOTS, found, strict=True):
                plain = roofline.decode(device, shape, [slots] * batch, scores=False)
                assert plain.total < one.total


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_roofline_divided_long_request_does_not_hold_up_the_others(
    device: devices.Device,
) -> None:
    """One long request takes its own time unless it has more splits; then the bytes' time is."""
    long = len(range(0, max(MIXED), decode_tile(128, 2, LLAMA.group))) * devices.LOAD
    divided, whole = (roofline.decode(device, LLAMA, MIXED, divides=d) for d in (True, False))
    assert whole.attend >= long
    assert divided.total <= whole.total + 4 * devices.LOAD  # half of two launches looks for work
    if device is H100:
        assert divided.attend < 0.6 * whole.attend
        assert divided.share > 0.8


def test_roofline_scores_are_half_of_attention() -> None:
    """Scores are half of attention's products, and take no less."""
    for shape in (OPT, LLAMA):
        found = roofline.prompt(H100, shape, 32768)
        assert found.scores >= 0.5 * found.attention


def test_device_of_a_driver_name_is_known() -> None:
    """And none for what has no data sheet here."""
    names = {
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H200": "H200",
        "NVIDIA A100-SXM4-80GB": "A100-80GB",
        "NVIDIA L4": "L4",
    }
    for name, key in names.items():
        assert devices.device_of(name) == DEVICES[key]
    for name in ("NVIDIA L40S", "Tesla T4", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB"):
        assert devices.device_of(name) is None


def test_predictions_agree_with_their_csv() -> None:
    """The CSV is what the model says."""
    with PREDICTED.open(newline="") as file:
        written = list(csv.DictReader(file))
    found = [row for device in DEVICES.values() for row in roofline.rows(device)]
    assert len(written) == len(found)
    for was, now in zip(written, found, strict=True):
        assert [was["device"], was["figure"]] == [now["device"], now["figure"]]
        assert float(was["predicted"]) == pytest.approx(now["predicted"], rel=1e-3)
