# SPDX-License-Identifier: Apache-2.0
"""Facts in hays are what they say; no engine, the small model's tokenizer is enough."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.quality import charts, needles
from benchmarks.quality.facts import COUNT, FORMS, KINDS, LENGTHS, Facts, depths, encode, facts
from benchmarks.quality.paired import answered, lines, paired
from benchmarks.quality.phrasings import CONFIRMATION, DEVELOPMENT, Source
from benchmarks.quality.plans import ANEW, FACTS, NEEDLES, OTHER_LENGTHS, PLANS, VARIANTS
from benchmarks.quality.tables import row
from benchmarks.quality.texts import documents
from benchmarks.smollm2 import model_dir
from tests.needs import needs_texts

pytestmark = pytest.mark.slow

LENGTH = 512
SOURCES = (DEVELOPMENT, CONFIRMATION)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The small model's, where the texts can be had."""
    needs_texts()
    return Tokenizer.from_file(str(model_dir("float32") / "tokenizer.json"))


@pytest.fixture(scope="module")
def tasks(tokenizer: Tokenizer) -> dict[tuple[str, str], Facts]:
    """All of them, by source and form."""
    return {
        (source.name, form): facts(tokenizer, source, form, length=LENGTH)
        for source in SOURCES
        for form in FORMS
    }


def texts(tokenizer: Tokenizer, rows: torch.Tensor) -> list[str]:
    """Each row as text, special tokens and all."""
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in rows.tolist()]


def test_context_says_each_fact_once(
    tokenizer: Tokenizer, tasks: dict[tuple[str, str], Facts]
) -> None:
    """In the prompt once, and last in the tail, where it alone is judged; of 2 to 12 tokens."""
    for (_, form), task in tasks.items():
        assert task.context.shape == (COUNT, LENGTH) and COUNT >= 48
        assert task.length == LENGTH and not task.costs
        prompts = texts(tokenizer, task.context)
        for index, prompt in enumerate(prompts):
            asked, *others = task.facts[index]
            assert len(others) == (4 if form == "one_of_many" else 0)
            for fact in (asked, *others):
                assert prompt.count(fact.fill(fact.phrasing.said)) == 1
                assert prompt.count(fact.value) == 1, (form, fact)
            judged = task.answers[index] == 0
            assert int(judged.sum()) in LENGTHS
            assert tokenizer.decode(task.tail[index][judged].tolist()) == f" {asked.value}"
            end = int(judged.nonzero().max()) + 1
            assert judged[end - int(judged.sum()) : end].all()
            assert not task.tail[index, end:].any()


def test_question_stands_where_the_task_says(
    tokenizer: Tokenizer, tasks: dict[tuple[str, str], Facts]
) -> None:
    """At the prompt's end, before an instruction there, in the third turn, or not in the prompt."""
    for (name, form), task in tasks.items():
        source = next(source for source in SOURCES if source.name == name)
        prompts, tails = texts(tokenizer, task.context), texts(tokenizer, task.tail)
        rows = zip(task.facts, prompts, tails, strict=True)
        for index, ((fact, *_), prompt, tail) in enumerate(rows):
            question = fact.fill(fact.phrasing.asked)
            lead = fact.fill(fact.phrasing.lead)
            instruction = source.instructions[index % len(source.instructions)]
            last = {
                "instructed": f"\n\nQuestion: {question} {instruction}\nAnswer:",
                "turns": f"user\n{question}<|im_end|>\n<|im_start|>assistant\n",
            }.get(form, f"\n\nQuestion: {question}\nAnswer:")
            answer = f"{lead.lstrip() if form == 'turns' else lead} {fact.value}"
            if form == "asked_later":
                assert question not in prompt
                assert tail.startswith(last + answer)
            else:
                assert prompt.count(question) == 1 and prompt.endswith(last)
                assert tail.startswith(answer)
            if form == "turns":
                turns = prompt.split("<|im_start|>user\n")[1:]
                assert len(turns) == 3 and fact.value in turns[0]


def test_facts_are_spread_over_depths(
    tokenizer: Tokenizer, tasks: dict[tuple[str, str], Facts]
) -> None:
    """Spread over all of the hay, or of the first turn, whatever the kind and the phrasing."""
    for (_, form), task in tasks.items():
        of = [facts[0].depth for facts in task.facts]
        assert sorted(of) == pytest.approx([(i + 0.5) / COUNT for i in range(COUNT)])
        for kind in KINDS:
            depths = [facts[0].depth for facts in task.facts if facts[0].kind == kind]
            assert len(depths) == COUNT // len(KINDS)
            assert max(depths) - min(depths) > 0.5
        hay = LENGTH // 2 if form == "turns" else LENGTH
        prompts = texts(tokenizer, task.context)
        for prompt, (fact, *_) in zip(prompts, task.facts, strict=True):
            before = len(encode(tokenizer, prompt[: prompt.index(fact.value)]))
            assert abs(before / hay - fact.depth) < 0.5, (form, fact)
        assert set(Counter(task.hays).values()) == {COUNT // 2}


def test_development_set_shares_nothing_with_the_other(
    tokenizer: Tokenizer, tasks: dict[tuple[str, str], Facts]
) -> None:
    """Seeds, hays, subjects, phrasings, facts, instructions, turns."""

    def everything(source: Source) -> set[str]:
        phrasings = [p for kind in KINDS for p in source.phrasings[kind]]
        sentences = [text for p in phrasings for text in (p.said, p.asked, p.lead)]
        stated = [fact.value for facts in tasks[source.name, "one_of_many"].facts for fact in facts]
        parts = (source.texts, source.subjects, sentences, stated, source.instructions)
        return {x for part in (*parts, source.turns) for x in part}

    assert DEVELOPMENT.seed != CONFIRMATION.seed
    assert not everything(DEVELOPMENT) & everything(CONFIRMATION)
    for name in (*DEVELOPMENT.texts, *CONFIRMATION.texts):
        assert documents(name)
    for source in SOURCES:
        for kind in KINDS:
            assert len(source.phrasings[kind]) >= 3
        for instruction in source.instructions:
            assert 36 <= len(encode(tokenizer, f" {instruction}")) <= 44
        facts_of = [[facts[0] for facts in tasks[source.name, form].facts] for form in FORMS]
        assert all(found == facts_of[0] for found in facts_of)


def test_facts_row_is_enough_for_paired_errors(tasks: dict[tuple[str, str], Facts]) -> None:
    """A fact is found whole or not at all; a row says enough for a paired standard error."""
    task = tasks["confirmation", "asked_now"]
    first = task.answers == 0
    nats = torch.zeros(first.shape)
    full = task.figures(nats, first, 0)
    assert full == [1.0] * COUNT
    first[0, int((task.answers[0] == 0).nonzero()[0])] = False
    ours = task.figures(nats, first, 0)
    assert ours == [0.0] + [1.0] * (COUNT - 1)
    theirs = row("test", task, "full", 1.0, LENGTH, full, full)
    found = row("test", task, "h2o", 0.1, 48, ours, full)
    difference, error = paired(ours, full)
    assert difference == pytest.approx(found["above_full"], abs=1e-4)
    assert error == pytest.approx(found["std"] / COUNT**0.5, abs=1e-4)
    assert answered([1.0, 0.0, 1.0], [1.0, 1.0, 0.0]) == (0.5, pytest.approx(0.125**0.5))
    table = lines([theirs, found])
    assert table[-1] == "| asked_now 512 | 10 %: 48 | 1.00 (n = 50) | 0.98 (-0.02 ± 0.02) |"


def test_plans_cover_every_form_at_three_budgets() -> None:
    """Every form in each set, at three budgets; longer ones; of policies that there are."""
    assert len(FACTS) == 3 * len(FORMS) + len(OTHER_LENGTHS)
    sets = {"dev": DEVELOPMENT, "anew": ANEW}
    for name, plan in FACTS.items():
        source = plan.make.keywords["source"]  # type: ignore[attr-defined]
        assert source is sets.get(name.rpartition("-")[2], CONFIRMATION)
        longer = name.endswith(("-4k", "-8k"))
        assert (name in OTHER_LENGTHS) is (longer or name.endswith(("-512", "-1536")))
        others = (0.1, 0.2) if longer else (0.2,)
        assert plan.shares == (others if name in OTHER_LENGTHS else (0.1, 0.2, 0.3))
        assert set(plan.policies) <= set(VARIANTS)


def test_chart_parts_name_plans_that_exist() -> None:
    """Each part is a plan's, of known policies: a plan runs all that are named."""
    for file, plan, shares, policies in charts.PARTS:
        assert (file == "quality_facts.csv") is (plan in FACTS)
        known = {**PLANS, **FACTS}[plan]
        assert set(policies) <= set(VARIANTS)
        assert set(map(float, shares)) <= set(known.shares)


def test_needles_are_counted_by_where_they_are_stated() -> None:
    """By fifths of the prompt, of the row that came last; what was not measured has none."""
    places = depths(CONFIRMATION, 10)
    assert sorted(places) == pytest.approx([0.05 + i / 10 for i in range(10)])
    row = {"task": "asked_now", "length": "64", "policy": "h2o", "share": "0.2"}
    first = {**row, "each": " ".join("1" for _ in places)}
    last = {**row, "each": " ".join(str(int(place > 0.5)) for place in places)}
    assert needles.found([first, last], "h2o", 64) == [0, 0, 0.5, 1, 1]
    assert needles.found([first, last], "full", 64) is None
    assert needles.found([first, last], "h2o", 65) is None


def test_needles_are_drawn_for_lengths_that_are_whole(tmp_path: Path) -> None:
    """A length that lacks a policy is left out."""
    rows = [
        {
            "task": "asked_now",
            "length": length,
            "policy": policy,
            "share": share,
            "each": "1 0 " * 5,
        }
        for length in ("64", "128")
        for policy, share in (("full", "1.0"), *((name, "0.2") for name in NEEDLES))
    ]
    needles.draw(rows[:5], tmp_path / "one.svg")
    needles.draw(rows[:-1], tmp_path / "also_one.svg")
    needles.draw(rows, tmp_path / "two.svg")
    one, also, two = ((tmp_path / f"{n}.svg").read_text() for n in ("one", "also_one", "two"))
    assert one == also != two
