# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a long prompt beside streams runs both scores. Nothing is timed here."""

from __future__ import annotations

import pytest

from benchmarks.throughput.beside import Work, ratios, rows


@pytest.mark.engine
@pytest.mark.slow
def test_beside_second_reading_takes_twice_the_steps() -> None:
    """Tokens that are read again count against the step, so a step computes half as many."""
    once, twice = found = list(rows(1, Work(prompt=900, streams=2, batched=300)))
    assert once["steps"] == -(-900 // (300 - 2))
    assert twice["steps"] >= 2 * once["steps"] - 1
    assert ratios(found, "steps") == [twice["steps"] / once["steps"]]


def test_beside_ratio_is_of_each_pair() -> None:
    """Each pair has its ratio, whoever ran first."""
    sides = {score: f"h2o2, score={score}" for score in ("combined", "reconstruction")}
    found = [
        {"pair": 0, "side": sides["combined"], "ttft_s": 2.0},
        {"pair": 0, "side": sides["reconstruction"], "ttft_s": 4.0},
        {"pair": 1, "side": sides["reconstruction"], "ttft_s": 9.0},
        {"pair": 1, "side": sides["combined"], "ttft_s": 3.0},
    ]
    assert ratios(found, "ttft_s") == [2.0, 3.0]
