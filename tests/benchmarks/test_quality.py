# SPDX-License-Identifier: Apache-2.0
"""The bench in its quick form: real model, real texts, real engine; orders, not digits."""

from __future__ import annotations

import csv
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, processors

from benchmarks import gemma3
from benchmarks.quality.__main__ import Bench, begin, plans
from benchmarks.quality.chart import PANELS, draw, panel
from benchmarks.quality.plans import QUICK
from benchmarks.quality.tables import row
from benchmarks.quality.tasks import Task
from tests.needs import needs_texts


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_quality_at_quick_sizes_orders_policies() -> None:
    """Heavy hitters cost far less than a window alone; at 100 %, nothing changes."""
    needs_texts()
    bench = Bench({"quick": QUICK}, "float32", progress=False)
    rows = {row["policy"]: row for row in bench.rows(QUICK.policies)}
    above = {policy: row["above_full"] for policy, row in rows.items()}
    assert above["full"] == 0
    for policy in ("h2o", "h2o2"):
        assert 0 < above[policy] < 0.25 * above["local"], above
    task = bench.tasks["quick"]
    with bench.engine("h2o", {}) as llm:
        (whole,) = bench.judged(llm, "quick", [task.length])
    figures = task.figures(*whole, 0)
    assert sum(figures) / len(figures) == pytest.approx(rows["full"]["mean"], abs=1e-4)


def test_a_policy_that_is_named_runs_in_every_plan() -> None:
    """Also where the plan does not list it: it would be left out in silence."""
    asked = Namespace(quick=False, dev=False, only=["1k", "pairs"], shares=None, variant=[])
    for named in (None, ["snapkv"]):
        found = plans(Namespace(**vars(asked), policies=named))
        assert [*found] == ["1k", "pairs"]
        assert all(("snapkv" in plan.policies) == bool(named) for plan in found.values())


def test_texts_begin_as_the_model_s_do() -> None:
    """The tokenizer's own first token takes the place of a context's; most have none."""
    tokenizer = Tokenizer(models.WordLevel({"<bos>": 0, "a": 1}, "a"))
    nothing = torch.full((3,), -1)
    task = Task("prose", torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.ones(2, 3), nothing)
    assert torch.equal(begin(task, tokenizer).context, task.context)
    tokenizer.post_processor = processors.TemplateProcessing(
        "<bos> $A", special_tokens=[("<bos>", 0)]
    )
    assert begin(task, tokenizer).context.tolist() == [[0, 2, 3], [0, 5, 6]]


def test_gemma_is_fetched_by_those_who_accept_its_terms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is installed before."""
    monkeypatch.setattr(sys, "argv", ["gemma3", str(tmp_path / "model")])
    with pytest.raises(SystemExit):
        gemma3.main()
    assert "required: --accept-gemma-terms" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_quality_figures_count_all_tokens_but_the_first() -> None:
    """Prose costs what its tokens but the first cost; an answer is all of its tokens."""
    nats = torch.tensor([[9.0, 1.0, 2.0], [9.0, 3.0, 5.0]])
    first = torch.tensor([[True, True, False], [False, True, True]])
    context = torch.zeros(2, 5, dtype=torch.int64)
    tail = torch.zeros(2, 3, dtype=torch.int64)
    prose = Task("prose", context, tail, torch.tensor([-1, -1, -1]))
    assert prose.figures(nats, first, 5) == [1.5, 4.0]
    assert prose.figures(nats, first, 6) == [2.0, 5.0]  # the budget is full before the last only
    asked = Task("asked", context, tail, torch.tensor([-1, 0, 1]))
    assert asked.figures(nats, first, 5) == [1.0, 1.0, 0.0, 1.0]
    assert (prose.length, asked.length) == (8, 5)
    found = row("test", prose, "h2o", 0.5, 16, [1.5, 4.0], [1.0, 4.0])
    assert (found["mean"], found["above_full"], found["worse_than_full"]) == (2.75, 0.25, 1)


def test_quality_chart_is_drawn_from_the_results(tmp_path: Path) -> None:
    """The figures that are kept are drawn; a variant that the engine does not have is left out."""
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    names = ("quality.csv", "quality_facts.csv", "quality_presses.csv")
    texts = [(results / name).read_text() for name in names]
    rows = [row for text in texts for row in csv.DictReader(text.splitlines())]
    assert {panel(row) for row in rows} >= set(PANELS)
    draw(rows, tmp_path / "a.svg")
    variant = next(row for row in rows if row["task"] == "asked_now") | {"policy": "other"}
    draw([*rows, variant], tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
