# SPDX-License-Identifier: Apache-2.0
"""The places of a fact, and the share of layers and heads that holds it."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.quality.facts import facts
from benchmarks.quality.phrasings import CONFIRMATION
from benchmarks.smollm2 import model_dir
from research import kept
from tests.needs import needs_texts


@pytest.mark.slow
@pytest.mark.parametrize("form", kept.FORMS)
def test_places_of_each_fact_are_those_of_its_value(form: str) -> None:
    """The tokens there decode to the value."""
    needs_texts()
    tokenizer = Tokenizer.from_file(str(model_dir("float32") / "tokenizer.json"))
    task = facts(tokenizer, CONFIRMATION, form, count=10, length=512)
    for index, (fact, *_) in enumerate(task.facts):
        wanted = kept.places(task, tokenizer, index)
        said = tokenizer.decode(task.context[index][wanted.start : wanted.stop].tolist())
        assert said == f" {fact.value}"


def test_shares_of_two_layers_count_heads_that_hold_a_token() -> None:
    """The mean over the fact's tokens, and the token that fewest heads hold."""
    none = kept.NOTHING
    positions = np.array([[[4, 5, none], [5, 9, none]], [[0, 1, 4], [4, 5, 7]]])
    assert kept.shares(positions, range(4, 6)) == (0.75, 0.75)
    assert kept.shares(positions, range(5, 8)) == (pytest.approx(1 / 3), 0.0)
