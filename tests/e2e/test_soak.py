"""The soak in its short form: a server under load, its pages counted, its worker killed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soak.__main__ import SHORT, run

KINDS = {
    "whole", "stream", "disconnect", "abort", "samples", "malformed", "long", "burst", "canary",
}  # fmt: skip


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("mode", "killed"), [("always", ("worker",)), ("pressure", ())])
def test_soak(tmp_path: Path, mode: str, killed: tuple[str, ...]) -> None:
    """Nothing is wrong with answers, canaries, memory, pages or death; and the load was a load."""
    shape = replace(SHORT, requests=SHORT.requests // 2)
    report = run(shape, mode, "window", tmp_path, killed)
    assert not list(report.faults())
    assert {kind for kind, _ in report.outcome.counts} == KINDS
    results = {result for _, result in report.outcome.counts}
    assert results == {"answered", "left", "refused with 400", "refused with 404"}
    assert report.figures.peak_held > 0.9 * report.figures.total
    row = report.row()
    assert row["requests"] == report.outcome.num_requests and row["faults"] == 0
    assert 0 < row["canaries_compared"] <= row["canaries"]
