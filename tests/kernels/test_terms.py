# SPDX-License-Identifier: Apache-2.0
"""Terms that are added once, and a lifetime: the reference, by hand and by a second definition."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.one_head import Inputs, budget, causal, close, head, strip
from vllm_h2o.kernels.reference import Head, reached
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.policy import Ranking, Term
from vllm_h2o.policy.ranking import Reduce

SNAPKV = Term("window", "max", reach=2)


def test_an_observation_window_by_hand() -> None:
    """C = 4, R = 0, five tokens: the largest probability of two queries, which reaches two on."""
    weights = torch.tensor([1.0, 1.0, 8.0, 1.0, 2.0], dtype=torch.float64)
    key, query = weights.log()[:, None], torch.ones(5, 1, 1, dtype=torch.float64)
    one = Head(Strip.empty(1, torch.float64), budget(4, 0, 0), Ranking(SNAPKV))
    one.step(query, key, key, ends_prompt=True, terms=[(SNAPKV, query[3:])])
    # The query of token 3 gives 1, 1, 8 and 1 of 11; that of token 4 less, and itself 2 of 13.
    # Tokens 3 and 4 have the 8 of 11 of token 2.
    assert one.strip.position.tolist() == [2, 3, 4]
    assert one.strip.score.tolist() == pytest.approx([8 / 11] * 3)
    one.step(query[:1], key[:1], key[:1])
    assert one.strip.score.tolist() == pytest.approx(
        [8 / 11 + w / 12 for w in (8, 1, 2)] + [1 / 12]
    )
    assert one.victim == 3


@pytest.mark.parametrize("chunks", [[30], [10, 20], [22, 1, 7]])
@pytest.mark.parametrize("prompt", [30, 9])
@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_an_observation_window(chunks: list[int], prompt: int, reduce: Reduce) -> None:
    """No other query scores, in chunks of any size; all tokens have scores, kept or not."""
    term = Term("window", reduce, power=2, reach=8)
    inputs, one = Inputs.draw(32, group=2), head(10, 4)
    one.ranking = Ranking(term)
    chunks, start = chunks if prompt == 30 else [2, 7], 0
    for i, length in enumerate(chunks):
        part = slice(start, start := start + length)
        last = i == len(chunks) - 1
        asked = [(term, inputs.query[prompt - 5 : prompt])] if last else []
        one.step(inputs.query[part], inputs.key[part], inputs.value[part], last, asked)
    each = inputs.probabilities(causal(32))[prompt - 5 : prompt, :, :prompt].square().flatten(0, 1)
    value = [max(column) if reduce == "max" else sum(column) for column in each.T.tolist()]
    score = [max(value[max(j - 8, 0) : j + 1]) for j in range(prompt)]
    expected = list(range(prompt))
    if prompt == 30:
        best = sorted(range(prompt - 4), key=lambda j: (-score[j], j))[:5]
        expected = sorted([*best, *range(prompt - 4, prompt)])
    assert one.strip.position.tolist() == expected
    assert one.strip.score.tolist() == pytest.approx([score[j] for j in expected])


def test_a_last_token_computed_alone_scores_as_later_ones_do() -> None:
    """A prompt of one token, or a turn of one, has no window: its query adds its probabilities."""
    inputs, one = Inputs.draw(3, group=2), head(10, 4)
    one.ranking = Ranking(SNAPKV)
    for i in range(3):
        one.step(inputs.query[[i]], inputs.key[[i]], inputs.value[[i]], ends_prompt=i == 1)
    close(one.strip.score, inputs.probabilities(causal(3))[1:].sum(dim=(0, 1)))


def test_a_lifetime_ends() -> None:
    """Three tokens after the prompt its tokens have the scores that they have without the window.

    Later tokens keep theirs, and what was paid to the prompt since then is not given back.
    """
    brief, other = Term("window", "max", weight=0.3, lifetime=3), head(20, 4)
    inputs, one = Inputs.draw(14, group=2), head(20, 4)
    one.ranking = Ranking(Term("all", "sum"), brief)
    part = slice(0, 10)
    tokens = (inputs.query[part], inputs.key[part], inputs.value[part], True)
    other.step(*tokens)
    before = other.strip.score
    one.step(*tokens, terms=[(brief, inputs.query[5:10])])
    assert (one.strip.score[:9] > before[:9]).all()
    for i in range(10, 13):
        for each in (one, other):
            each.step(inputs.query[[i]], inputs.key[[i]], inputs.value[[i]])
    close(one.strip.score[:10], before)
    close(one.strip.score[10:], other.strip.score[10:])


@pytest.mark.parametrize(
    ("scores", "positions", "reach", "expected"),
    [
        ([3, 1, 2, 0, 0], [0, 1, 2, 3, 4], 0, [3, 1, 2, 0, 0]),
        ([3, 1, 2, 0, 0], [0, 1, 2, 3, 4], 1, [3, 3, 2, 2, 0]),
        ([3, 1, 2, 0, 0], [0, 1, 2, 3, 4], 8, [3, 3, 3, 3, 3]),
        ([0, 3, -1, 0, -2], [4, 0, 1, 2, 9], 2, [0, 3, 3, 3, -2]),
    ],
)
def test_reach_takes_the_largest_earlier_score(
    scores: list[float], positions: list[int], reach: int, expected: list[float]
) -> None:
    """The largest score of tokens up to ``reach`` positions before, wherever they lie."""
    held = strip(scores, positions)
    assert reached(held.score, held.position, reach).tolist() == expected
