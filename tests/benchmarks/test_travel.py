# SPDX-License-Identifier: Apache-2.0
"""The benchmark of what travels from one engine to another. Nothing is timed here."""

from __future__ import annotations

import pytest

from benchmarks.throughput.travel import OURS, STOCK, rows


@pytest.mark.engine
@pytest.mark.slow
def test_a_share_of_the_bytes_travels_and_no_token_is_computed_again() -> None:
    """Of two lengths, each with a budget of its own; scores and positions travel, too."""
    found = {(row["side"], row["length"]): row for row in rows(1, [160, 320], 0.2)}
    for length in (160, 320):
        stock, ours = found[STOCK, length], found[OURS, length]
        assert (stock["found"], ours["found"]) == (0, length)
        assert ours["budget"] == length // 5 and stock["share"] == 1
        assert ours["share"] == pytest.approx(ours["bytes"] / stock["bytes"], abs=1e-3)
        assert 0.2 < ours["share"] < 0.25
