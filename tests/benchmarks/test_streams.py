"""The bench of long texts in its quick form: real model, real text, real engine."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.quality.texts import TextsUnavailableError, archive
from benchmarks.streams import parse, run


@pytest.mark.timeout(1200)
def test_rolling_costs_what_original_positions_cost(tmp_path: Path) -> None:
    """Part by part, within what the model was trained on; and beyond the limit as before it."""
    try:
        archive()
    except TextsUnavailableError as error:
        pytest.skip(str(error))
    table = tmp_path / "streams.csv"
    arguments = parse(["--quick", "--csv", str(table)])
    rows = list(run(arguments, arguments.policies))
    rolled, original = rows[:4], rows[4:]
    ends = [256, 512, 768, 1023]
    assert [row["end"] for row in rolled] == [row["end"] for row in original] == ends
    assert [row["renumbered"] for row in original] == [0] * 4
    assert rolled[-1]["renumbered"] >= 2
    for one, other in zip(rolled, original, strict=True):
        assert one["nll"] == pytest.approx(other["nll"], abs=0.05)
    with table.open(newline="") as file:
        assert [float(row["nll"]) for row in csv.DictReader(file)] == [row["nll"] for row in rows]
