# SPDX-License-Identifier: Apache-2.0
"""Dialogues that go on from an evicted cache, next to ones that are computed again, in small."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.quality.texts import questions
from benchmarks.smollm2 import model_dir
from research.dialogues import PASSAGES, QUESTIONS, Turn, dialogues, prompts, rows, spans, table
from tests.e2e.harness import tiny_llama
from tests.needs import needs_texts


def test_answers_are_spans_of_the_passage() -> None:
    """Several people marked spans; the first person's counts."""
    passage = "In May she left, with her dog. Her dog was old."
    answers = (
        "possible answers for question1:\nIn May she left, In May she left, with her dog,\n"
        "possible answers for question2:\nHer dog was old. dog was old.\n"
        "possible answers for question3:\nCANNOTANSWER CANNOTANSWER"
    )
    assert spans(passage, answers) == [
        "In May she left",
        "Her dog was old.",
        "The text does not say.",
    ]


@pytest.mark.slow
def test_dialogue_rows_share_the_first_turn(tmp_path: Path) -> None:
    """The first turn is the same on both sides; later ones begin from what was left."""
    draw = random.Random(0)
    talks = [
        [
            Turn([draw.randrange(256) for _ in range(num)], [draw.randrange(256) for _ in range(9)])
            for num in (60, 12, 20)
        ]
        for _ in range(3)
    ]
    assert [len(prompt) for prompt, _ in prompts(talks, 2)] == [60 + 9 + 12 + 9 + 20] * 3
    found = list(rows(tiny_llama(tmp_path, 4, 2), ["h2o"], [32], talks))
    assert [row["turn"] for row in found] == [1, 2, 3]
    first, *later = found
    assert first["found"] == 0 and first["continued_each"] == first["recomputed_each"]
    for row, before in zip(later, (60 + 9, 60 + 9 + 12 + 9), strict=True):
        # The last token of an answer was never computed.
        assert row["found"] == pytest.approx((before - 1) / row["prompt_tokens"], abs=1e-3)
        assert row["difference"] != 0
        assert row["full"] > 0
    assert table(found).count("| h2o | 32 |") == 3


def test_dialogue_prompts_begin_with_all_that_was_said() -> None:
    """Each turn's prompt begins with all that was said, answers are there, and seeds differ."""
    needs_texts(lambda: questions("Quac/test-tiny.jsonl"))
    tokenizer = Tokenizer.from_file(str(model_dir("float32") / "tokenizer.json"))
    talks, others = (dialogues(tokenizer, 3, seed) for seed in (1, 2))
    assert [len(talk) for talk in talks] == [QUESTIONS * PASSAGES] * 3
    starts = {tuple(talk[0].asked) for talk in (*talks, *others)}
    assert len(starts) == 6
    for turn in range(1, QUESTIONS * PASSAGES):
        before, after = (prompts(talks, n) for n in (turn - 1, turn))
        for (prompt, answer), (longer, _) in zip(before, after, strict=True):
            assert longer[: len(prompt) + len(answer)] == [*prompt, *answer]
            assert tokenizer.decode(answer, skip_special_tokens=False).endswith("<|im_end|>")
            assert len(answer) > 1 and longer[len(prompt) + len(answer) :]
