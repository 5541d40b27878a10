# SPDX-License-Identifier: Apache-2.0
"""Questions far into a text, in a quick form: real model, real text, real engine."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.quality.facts import facts
from benchmarks.quality.phrasings import CONFIRMATION
from benchmarks.smollm2 import model_dir
from research.stream_recall import parse, run, stream, summary
from tests.needs import needs_texts

QUICK = ["--questions", "3", "--prompt", "160", "--preamble", "700", "--warm-up", "100"]
SHAPE = ["--cache", "256", "--chunk", "128", "--limit", "512"]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_far_and_afresh(tmp_path: Path) -> None:
    """Past three renumberings facts are found as afresh; what is judged are the facts' tokens."""
    needs_texts()
    tokenizer = Tokenizer.from_file(str(model_dir("float32") / "tokenizer.json"))
    task = facts(tokenizer, CONFIRMATION, "asked_now", 3, 160)
    tokens, asked = stream(tokenizer, task, 700)
    for one, (fact, *_) in zip(asked, task.facts, strict=True):
        assert tokenizer.decode(tokens[one.answer : one.end]) == f" {fact.value}"
        assert fact.value in tokenizer.decode(tokens[one.start : one.answer])
    assert len(tokens) == asked[-1].end
    table = tmp_path / "recall.csv"
    flags = ["--policies", "streaming", "--csv", str(table)]
    rows = list(run(parse([*QUICK, *SHAPE, *flags])))
    assert [row["start"] for row in rows] == [one.start for one in asked]
    assert rows[-1]["renumbered"] >= 3
    for row in rows:
        assert row["found"] == row["found_afresh"] == 1
        assert row["nats"] == pytest.approx(row["nats_afresh"], abs=1)
    assert summary(rows).startswith("streaming: found 3 of 3, afresh 3, difference +0.000")
    with table.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 3
