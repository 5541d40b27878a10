# SPDX-License-Identifier: Apache-2.0
"""The soak in its short form: a server under load, its pages counted, its worker killed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soak.__main__ import SHORT, run
from benchmarks.soak.server import Server
from tests.e2e.forking import FORKING

KINDS = {
    "whole", "stream", "disconnect", "abort", "samples", "conversation", "malformed", "long",
    "burst", "canary", "beams", "tiny", "mixed", "tools", "torn",
}  # fmt: skip


@pytest.mark.timeout(1200)
def test_short_soak_finds_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is wrong with answers, canaries, memory, pages or death; and the load was a load.

    Half of it with ``continuation``, half with ``pressure``.
    """
    monkeypatch.setattr(Server, "vllm", FORKING)
    shape = replace(SHORT, requests=SHORT.requests // 2)
    reports = [
        run(shape, mode, "snapkv", tmp_path / mode, killed)
        for mode, killed in (("continuation", ("worker",)), ("pressure", ()))
    ]
    for report in reports:
        assert not list(report.faults())
        assert report.figures.peak_held > 0.9 * report.figures.total
        row = report.row()
        assert row["requests"] == report.outcome.num_requests and row["faults"] == 0
        assert 0 < row["canaries_compared"] <= row["canaries"]
    counts = reports[0].outcome.counts + reports[1].outcome.counts
    assert {kind for kind, _ in counts} == KINDS
    results = {result for _, result in counts}
    # Of what is malformed few name another model, in a load this short perhaps none.
    assert results | {"refused with 404"} == {
        "answered", "left", "refused with 400", "refused with 404"
    }  # fmt: skip
