"""The soak in its short form: a server under load, its pages counted, its worker killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak.__main__ import SHORT, run


@pytest.mark.timeout(1200)
def test_soak(tmp_path: Path) -> None:
    """Nothing is wrong with answers, canaries, memory, pages or death; and the load was a load."""
    report = run(SHORT, "window", tmp_path, ("worker",))
    assert not list(report.faults())
    assert {kind for kind, _ in report.outcome.counts} == {
        "whole", "stream", "disconnect", "abort", "samples", "malformed", "long", "burst", "canary",
    }  # fmt: skip
    results = {result for _, result in report.outcome.counts}
    assert results == {"answered", "left", "refused with 400", "refused with 404"}
    assert report.figures.peak_held > 0.9 * report.figures.total
    row = report.row()
    assert row["requests"] == report.outcome.num_requests and row["faults"] == 0
    assert 0 < row["canaries_compared"] <= row["canaries"]
