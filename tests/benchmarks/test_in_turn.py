# SPDX-License-Identifier: Apache-2.0
"""Questions in turn continue from what the last turn has left. Nothing is tuned here."""

from __future__ import annotations

import pytest

from benchmarks.quality.in_turn import FULL, Work, rows
from tests.needs import needs_texts


@pytest.mark.engine
@pytest.mark.slow
def test_each_turn_begins_where_the_last_one_ended() -> None:
    """All but the last answer's last token, with a policy; whole pages of it in stock vLLM."""
    needs_texts()
    work = Work(documents=2, length=512, questions=3)
    full, ours = (list(rows(work, policy, 0.5)) for policy in (FULL, "h2o2 reconstruction"))
    assert [row["turn"] for row in full] == [row["turn"] for row in ours] == [1, 2, 3]
    assert all(row["count"] == 2 for row in (*full, *ours))
    assert ours[0]["cached"] == 512
    for row, stock in zip(ours[1:], full[1:], strict=True):
        assert row["cached"] - 32 <= stock["cached"] <= row["cached"]
    assert ours[0]["cached"] < ours[1]["cached"] < ours[2]["cached"]
    assert sum(row["found"] for row in full) > 1
