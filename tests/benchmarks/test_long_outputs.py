# SPDX-License-Identifier: Apache-2.0
"""Long outputs: the arithmetic of 4-grams and look-ups, and a tiny model's rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.quality import __main__ as quality
from benchmarks.quality.plans import LONG, VARIANTS, Plan
from benchmarks.quality.traces import KINDS, traces
from benchmarks.quality.writing import Writing, distinct_4_grams, first_4_grams
from tests.e2e.harness import tiny_llama


def bytewise() -> Tokenizer:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def texts(count: int, prompt: int, output: int, temperature: float) -> Writing:
    """Random beginnings of a vocabulary of 256."""
    ids = torch.randint(256, (count, prompt), generator=torch.Generator().manual_seed(1))
    tail = torch.zeros(count, output, dtype=torch.int64)
    return Writing("written", ids, tail, torch.full((output,), -1), temperature)


def test_4_grams_in_a_loop_are_counted_once() -> None:
    """A loop of two tokens has two 4-grams; no token before the fourth ends one."""
    assert first_4_grams([1, 2, 1, 2, 1, 2, 1]) == [False] * 3 + [True] * 2 + [False] * 2
    assert first_4_grams([1, 2, 3]) == [False] * 3
    assert distinct_4_grams([1, 2, 1, 2, 1, 2, 1]) == 0.5
    assert distinct_4_grams(range(9)) == 1.0
    tokens = random.Random(1).choices(range(3), k=200)
    grams = [tuple(tokens[i : i + 4]) for i in range(197)]
    assert distinct_4_grams(tokens) == len(set(grams)) / 197
    task = texts(1, 2, 200, 0.0)
    found = task.figures(torch.zeros(1, 200), torch.tensor([first_4_grams(tokens)]), 0)
    assert found == pytest.approx([distinct_4_grams(tokens)])
    assert task.length == 202 and not task.costs


@pytest.mark.parametrize("kind", KINDS)
def test_traces_ask_for_values_that_were_written_at_a_distance(kind: str) -> None:
    """Each look-up repeats a value behind its name; near and far ones are among all."""
    tokenizer = bytewise()
    task = traces(tokenizer, kind, 3, 2, 1024, 40)
    assert task.context.shape == (2, 40) and task.length == 1024
    every, near, far = task.views
    for row in range(2):
        ids = torch.cat([task.context[row], task.tail[row]])
        for number in task.answers[row].unique().tolist()[1:]:
            places = (task.answers[row] == number).nonzero()[:, 0]
            begin, end = 40 + int(places[0]), 41 + int(places[-1])
            back = int(task.distances[row, places[0]])
            assert begin >= 256 and end <= 1024 and end - begin == len(places)
            assert torch.equal(ids[begin:end], ids[begin - back : end - back])
            assert bool((near.answers[row, places] >= 0).all()) is (back < 128)
            assert bool((far.answers[row, places] >= 0).all()) is (back >= 256)
    right = torch.ones(task.tail.shape, dtype=torch.bool)
    nats = torch.zeros(task.tail.shape)
    assert [view.figures(nats, right, 0) for view in (every, near)] == [[1.0, 1.0]] * 2
    count = len(task.answers[0].unique()) - 1
    right[0, int((task.answers[0] >= 0).nonzero()[0])] = False
    assert task.figures(nats, right, 0) == pytest.approx([1 - 1 / count, 1.0])


def test_traces_that_end_too_early_are_an_error() -> None:
    """A trace is as long as it was asked for."""
    with pytest.raises(ValueError, match="a trace of edits has"):
        traces(bytewise(), "edits", 1, 1, 100_000)


def test_long_plans_run_policies_that_exist() -> None:
    """At two budgets, with a development set of each kind of trace."""
    for plan in LONG.values():
        assert plan.shares == (0.125, 0.25) and set(plan.policies) <= set(VARIANTS)
    assert {f"trace-{kind}{end}" for kind in KINDS for end in ("", "-dev")} <= set(LONG)


@pytest.mark.engine
def test_long_outputs_of_a_tiny_model_are_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget of the whole length writes the full cache's texts; a small one writes others."""
    said: list[list[int]] = []

    def remember(tokens: Sequence[int]) -> list[bool]:
        said.append(list(tokens))
        return first_4_grams(tokens)

    monkeypatch.setattr(quality, "first_4_grams", remember)
    folder = tiny_llama(tmp_path, 4, 2, max_len=1024)
    bytewise().save(str(tmp_path / "tokenizer.json"))
    plans = {
        "greedy": Plan(lambda _: texts(2, 16, 112, 0.0), (0.25, 1.0), ("h2o",)),
        "sampled": Plan(lambda _: texts(2, 16, 112, 0.7), (1.0,), ("h2o",)),
        "trace": Plan(lambda t: traces(t, "edits", 1, 2, 1024, 40), (0.25,), ("h2o",)),
    }
    bench = quality.Bench(plans, "float32", progress=False, folder=Path(folder))
    rows = list(bench.rows(["h2o"]))
    names = [(row["task"], row["policy"], row["share"]) for row in rows]
    edits = ["edits", "edits, near", "edits, far"]
    assert names == [
        *[("written", "full", 1.0)] * 2,
        *((name, "full", 1.0) for name in edits),
        *(("written", "h2o", share) for share in (0.25, 1.0, 1.0)),
        *((name, "h2o", 0.25) for name in edits),
    ]
    assert [(row["slots"], row["count"]) for row in rows[5:8]] == [(32, 2), (128, 2), (128, 2)]
    greedy, sampled, small, whole, again = (said[i : i + 2] for i in range(0, 10, 2))
    assert (whole, again) == (greedy, sampled)
    assert small != greedy and sampled != greedy
