# SPDX-License-Identifier: Apache-2.0
"""Terms that do not add up to one score are refused; others say what they need."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_h2o.policy import Policy, Ranking, Rule, Term, policies
from vllm_h2o.policy.eviction import Eviction
from vllm_h2o.policy.h2o2 import COMBINED


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"queries": "last"}, "all, window, rotated or reread"),
        ({"reduce": "median"}, "sum, mean or max"),
        ({"power": 3}, "power is 1 or 2"),
        ({"reach": -1}, "a negative part"),
        ({"weight": -0.5}, "a negative part"),
        ({"queries": "window", "block": 16}, "only rotated or reread queries"),
        ({"queries": "rotated", "block": 16, "reach": 3}, "without reach go by blocks"),
        ({"queries": "rotated", "skip": 16}, "only window queries skip"),
        ({"lifetime": 8}, "only a window term has a lifetime"),
    ],
)
def test_terms_without_meaning_are_refused(given: dict[str, Any], message: str) -> None:
    """Each with the term and what is wrong."""
    with pytest.raises(ValueError, match=message):
        Term(**{"queries": "all", **given})


SUM, WINDOW = Term("all", "sum"), Term("window", "max")


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ([Term("rotated", "max")], "the first term goes on after the prompt"),
        ([Term("all", "max")], "by sum or mean, without reach"),
        ([Term("all", "sum", reach=2)], "by sum or mean, without reach"),
        ([Term("all", "sum", weight=2)], "weight 1"),
        ([Term("window", "sum", lifetime=3)], "counts always"),
        ([SUM, Term("all", "mean")], "only the first term counts all queries"),
        ([SUM, Term("window", "mean")], "only a term over all queries is a mean"),
        ([Term("window", "mean")], "only a term over all queries is a mean"),
        ([SUM, Term("window", "max", lifetime=3), Term("rotated")], "comes last"),
        ([SUM, WINDOW, WINDOW], "one term of a kind"),
        ([SUM, Term("rotated"), Term("reread")], "rotated or reread"),
    ],
)
def test_rankings_without_a_score_are_refused(terms: list[Term], message: str) -> None:
    """Each with the terms and what is wrong."""
    with pytest.raises(ValueError, match=message):
        Ranking(*terms)


def test_a_ranking_says_what_it_needs() -> None:
    """By its terms alone, whatever policy it is of."""
    assert (COMBINED.power, COMBINED.by_age, COMBINED.scores_every_query) == (2, True, True)
    assert [term.queries for term in COMBINED.passes] == ["rotated", "window"]
    assert COMBINED.lifetime == 16 and COMBINED.term("reread") is None
    assert COMBINED.without("rotated").passes == (COMBINED.terms[2],)
    window = Ranking(WINDOW)
    assert (window.power, window.by_age, window.scores_every_query) == (1, False, False)
    assert window.passes == (WINDOW,) and window.lifetime == 0
    position = Ranking()
    assert (position.power, position.passes, position.lifetime) == (0, (), 0)
    assert not position.by_age and not position.scores_every_query


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "my-policy"}, "letters, digits and underscores"),
        ({"recent_ratio": 1.5}, "recent_ratio"),
        ({"num_sink_tokens": -1}, "num_sink_tokens"),
        ({"first_recent": -1}, "first_recent"),
        ({"merge": 1.0}, "merge"),
        ({"score": "sum", "scores": {"sum": Rule()}}, "names the policy's own rule"),
        ({"scores": {"sum": Rule()}}, "names the policy's own rule"),
    ],
)
def test_policies_without_meaning_are_refused(given: dict[str, Any], message: str) -> None:
    """Each with what is wrong."""
    with pytest.raises(ValueError, match=message):
        Policy(**{"name": "mine", "summary": "a test's", "ranking": Ranking(SUM), **given})


def test_policies_of_the_package() -> None:
    """Each is found by its own name; ranking by position keeps no heavy hitters."""
    names = ["h2o", "h2o2", "snapkv", "streaming", "local", "full"]
    assert list(policies())[: len(names)] == names
    for name in names:
        policy = policies()[name]
        assert (policy.name, bool(policy.summary)) == (name, True)
        assert policy.keeps_heavy is (name not in ("streaming", "local", "full"))
        assert policy.evicts is (name != "full")


def test_schedule_overwrites_single_tokens_alone() -> None:
    """Only single tokens, one at a time, are overwritten."""
    assert Eviction().overwrites and not Eviction().by_page
    assert not Eviction(every=2).overwrites
    assert Eviction(unit="page").by_page and not Eviction(unit="page").overwrites
    with pytest.raises(ValueError, match="at least one"):
        Eviction(every=0)
