# SPDX-License-Identifier: Apache-2.0
"""Rows and charts of P7 to P9 and their quality. Nothing is timed here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.quality import pressure as quality
from benchmarks.throughput import chart, drafts, serve
from benchmarks.throughput.profiles import under_pressure

LIMITS = serve.Limits(1000.0, 100.0)
FOUND = {
    "completed": 20,
    "duration": 10.0,
    "request_goodput": 1.8,
    "output_throughput": 256.0,
    **{f"p{p}_{name}_ms": 5.0 * p for name in serve.FIGURES for p in (50, 99)},
}


def test_machine_name_with_a_pin_counts_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """And without one nothing is said of it."""
    monkeypatch.setattr(record.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(record.os, "sched_getaffinity", lambda _: {3, 1})
    assert record.cores() == [1, 3]
    assert record.machine_name().endswith(", 2 of 4 cores")
    monkeypatch.setattr(record.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert record.machine_name().endswith(", 4 cores")


def test_serve_rows_give_goodput_and_a_chart(tmp_path: Path) -> None:
    """18 of 20 requests were in time; the chart has a line for each side."""
    rows = []
    for rate in (1.0, 2.0, 3.0):
        for side in serve.PROFILE.sides:
            late = 0.5 if rate == 2.0 and side.budget is None else 1.0
            found = {**FOUND, "request_goodput": 1.8 * late}
            row = serve.row_of(serve.PROFILE, side, rate, LIMITS, found)
            rows.append({**row, "preemptions": 0, "run": "now"})
    assert rows[0]["in_time"] == 0.9 and rows[0]["goodput"] == 0.9
    assert [serve.met(rows, side.name) for side in serve.PROFILE.sides] == [3.0, 1.0, 3.0]
    assert "| 2.0 | stock vLLM | 45% |" in serve.table(rows)
    record.append_rows(tmp_path / "rows.csv", rows)
    chart.draw_goodput(tmp_path / "rows.csv", tmp_path / "chart")
    assert (tmp_path / "chart.png").stat().st_size > 5000


def test_serve_sides_share_a_memory() -> None:
    """Stock vLLM's flags name no policy; each pool holds the longest sequence."""
    flags = [serve.flags(serve.PROFILE, side) for side in serve.PROFILE.sides]
    assert ["--kv-policy=h2o" in words for words in flags] == [True, False, True]
    assert "--kv-policy-config.eviction=pressure" in flags[0]
    assert all("--no-enable-prefix-caching" in words for words in flags)


def test_pressure_pools_in_float32_hold_as_many_sequences() -> None:
    """A pool holds as many sequences, whatever the type of K and V."""
    profiles = under_pressure((256, 256), "smollm2-float32")
    for num_seqs, profile in zip((4, 8, 16, 32), profiles, strict=True):
        blocks = profile.num_blocks(profile.sides[0], 512)
        assert blocks is not None and (blocks - 1) * profile.block_size >= num_seqs * 512


def test_pressure_texts_are_prose_in_two_parts() -> None:
    """Real prose in two parts; and what is excess, and what its error."""
    profile = under_pressure((8, 4), "smollm2-float32")[0]
    steps = dict.fromkeys(("mean_sequences", "preemptions", "evicted_tokens", "pressure_packs"), 1)
    row = quality.row_of(profile, profile.sides[0], [1.5, 2.5, 3.2], [1.0, 2.0, 3.0], steps)
    assert (row["nll"], row["above_full"], row["standard_error"]) == (2.4, 0.4, 0.1)


def test_drafts_intervals_have_room_for_a_step() -> None:
    """An interval of eviction has room for all drafts of a step, and the tokens around them."""
    options = drafts.SIDES["h2o, 50 %"]["kv_policy_config"]
    assert options["evict_every"] >= drafts.DRAFTS + 2
