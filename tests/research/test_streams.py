# SPDX-License-Identifier: Apache-2.0
"""The bench of long texts in its quick form: real model, real text, real engine."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from research.streams import parse, run
from research.streams_figures import CSV, draw, runs
from tests.needs import needs_texts


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_rolling_costs_what_original_positions_cost(tmp_path: Path) -> None:
    """Part by part, within what the model was trained on; and beyond the limit as before it."""
    needs_texts()
    table = tmp_path / "streams.csv"
    arguments = parse(["--quick", "--csv", str(table)])
    rows = list(run(arguments, arguments.policies))
    rolled, afresh, original = rows[:4], rows[4], rows[5:9]
    ends = [256, 512, 768, 1023]
    assert [row["end"] for row in rolled] == [row["end"] for row in original] == ends
    assert [row["renumbered"] for row in original] == [0] * 4
    assert rolled[-1]["renumbered"] >= 2
    for one, other in zip(rolled, original, strict=True):
        assert one["nll"] == pytest.approx(other["nll"], abs=0.05)
    assert (afresh["read_from"], afresh["start"], afresh["end"]) == (512, 768, 1023)
    assert afresh["nll"] == pytest.approx(rolled[-1]["nll"], abs=0.1)
    (run_of_all, _) = runs(table)
    assert run_of_all.pairs == [(1023, pytest.approx(rolled[-1]["nll"] - afresh["nll"]))]
    with table.open(newline="") as file:
        assert [float(row["nll"]) for row in csv.DictReader(file)] == [row["nll"] for row in rows]


def test_chart_of_the_committed_figures_is_drawn(tmp_path: Path) -> None:
    """The CSV has texts that were also read afresh."""
    assert {one.policy for one in runs(CSV) if one.rolls and one.far} >= {"h2o", "streaming"}
    draw(CSV, tmp_path / "streams")
    assert (tmp_path / "streams.png").stat().st_size > 10_000
