# SPDX-License-Identifier: Apache-2.0
"""The bench of the host's side runs, with the real schedulers. Nothing is timed here."""

from __future__ import annotations

import pytest

from benchmarks import host


def test_host_benchmark_of_a_few_steps_has_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock and policy, each part of a step; the policy's plans alone are built into a batch."""
    monkeypatch.setattr(host, "BUDGET", 64)
    stock, policy = host.measure(num_seqs=3, num_steps=2)
    assert (stock["side"], policy["side"]) == ("stock vLLM", "h2o")
    assert stock.pop("build_ms") is None
    assert all(row[name] > 0 for row in (stock, policy) for name in row if name.endswith("_ms"))
