# SPDX-License-Identifier: Apache-2.0
"""Terms that are added when a chunk is stored: the reference's values, in pages or outside them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.torch.prompts import BLOCKS, LENGTH, VIEWS, shared, strips
from vllm_h2o.kernels.batch import StepTensors
from vllm_h2o.kernels.reference import score_term
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.kernels.torch import prefill, terms
from vllm_h2o.policy import Term

TERMS = {
    "window, sum": Term("window", "sum", weight=0.7),
    "window, max": Term("window", "max", power=2, weight=0.3, reach=12, skip=16),
    "window, reach of sums": Term("window", "sum", power=2, reach=3, skip=1),
    "rotated": Term("rotated", "sum"),
    "rotated, reach": Term("rotated", "max", power=2, reach=8),
    "rotated, blocks": Term("rotated", "max", power=2, weight=0.1, block=40),
    "rotated, blocks of a page": Term("rotated", "sum", weight=0.1, block=3),
    "reread": Term("reread", "max", power=2, weight=0.1, block=40),
}


def step(query: torch.Tensor) -> StepTensors:
    """The tensors of a step in which only queries matter."""
    return StepTensors(query, query, query, query, 0.2, layer_index=1)


@pytest.mark.parametrize("by_age", [False, True])
@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize(("num_tokens", "first_query"), [(57, 0), (20, 0), (20, 9), (20, 20)])
def test_term_scores_in_any_tiles_equal_the_reference(
    name: str,
    by_age: bool,
    num_tokens: int,
    first_query: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference's scores, in tiles of any size; slots after the chunk's stay as they were.

    Reread queries also see other keys, each some of its own.
    """
    term, query = TERMS[name], torch.randn(4 + num_tokens, 6, 64)
    sinks = 3 * torch.randn(4 + num_tokens, 6) if term.queries == "reread" else None
    for tile in (7, prefill.QUERY_TILE):
        monkeypatch.setattr(prefill, "QUERY_TILE", tile)
        cache, chunk = shared(None, num_tokens)
        first = {"first_scoring_query": first_query, "first_window_query": first_query}
        chunk = replace(chunk, **first)
        before = strips(cache, BLOCKS, 64)
        for part in chunk.in_blocks(term, 16):
            terms.score_term(cache, part, replace(step(query), sink_logits=sinks), term, by_age)
        for head, strip in enumerate(strips(cache, BLOCKS, LENGTH)):
            expected = Strip(*(getattr(before[head], name)[:LENGTH] for name in VIEWS))
            own = query[chunk.tokens].double().unflatten(1, (2, 3))[:, head]
            if sinks is not None:
                of_head = sinks[chunk.tokens].unflatten(1, (2, 3))[first_query:, head]
            if first_query < num_tokens:
                how = (0.2, term, by_age, 16, None if sinks is None else of_head)
                score_term(own[first_query:], expected, *how)
            torch.testing.assert_close(strip.score, expected.score, rtol=1e-5, atol=1e-6)
            after = strips(cache, BLOCKS, 64)[head].score[LENGTH:]
            torch.testing.assert_close(after, before[head].score[LENGTH:], equal_nan=True)


@pytest.mark.parametrize("by_age", [False, True])
def test_window_scores_are_written_instead(by_age: bool) -> None:
    """Where other requests read the pages, their scores stay; the layer's row has the values."""
    term, query = TERMS["window, max"], torch.randn(24, 6, 64)
    cache, chunk = shared([3, 4], 20)
    twin, plain = shared(None, 20)
    found = torch.full((3, 2, LENGTH), 9.0)
    before = cache.score.clone()
    terms.score_term(cache, replace(chunk, window_scores=found), step(query), term, by_age)
    assert torch.equal(cache.score.nan_to_num(), before.nan_to_num())
    assert (found[[0, 2]] == 9.0).all()
    terms.score_term(twin, plain, step(query), term, by_age)
    expected = [strip.score for strip in strips(twin, BLOCKS, LENGTH)]
    torch.testing.assert_close(found[1].double(), torch.stack(expected))
