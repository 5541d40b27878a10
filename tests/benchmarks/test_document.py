# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a document runs all sides. Nothing is timed here."""

from __future__ import annotations

from itertools import chain

import pytest

from benchmarks.throughput.document import CACHED, FILES, OURS, STOCK, Work, ratios, rows
from tests.needs import needs_texts


@pytest.mark.engine
@pytest.mark.slow
def test_document_is_read_once_where_questions_continue() -> None:
    """As pages of stock's prefix cache, or as an entry, in which nearly as much is found."""
    needs_texts()
    work = Work(length=800, questions=4, share=0.3)
    found = {row["side"]: row for row in chain(rows(1, work), rows(1, work, [FILES]))}
    assert found[STOCK]["cached"] == 0
    assert 800 - 32 < found[CACHED]["cached"] <= 800
    assert found[OURS]["cached"] == found[FILES]["cached"] == 800
    assert found[OURS]["found"] == found[FILES]["found"]
    assert found[CACHED]["found"] == found[STOCK]["found"] >= 2
    assert found[OURS]["found"] >= found[STOCK]["found"] - 1


def test_document_ratio_is_of_each_round() -> None:
    """Each round has its ratio, whoever ran first."""
    found = [
        {"round": 0, "side": STOCK, "seconds": 20.0},
        {"round": 0, "side": OURS, "seconds": 4.0},
        {"round": 1, "side": OURS, "seconds": 5.0},
        {"round": 1, "side": STOCK, "seconds": 20.0},
    ]
    assert ratios(found, STOCK) == [5.0, 4.0]
