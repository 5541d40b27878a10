# SPDX-License-Identifier: Apache-2.0
"""Terms of scores, summed over chunks, for each prompt apart."""

from __future__ import annotations

import torch

from tests.kernels.caches import SHAPE, filled, number
from vllm_h2o.kernels.batch import PromptChunk
from vllm_h2o.kernels.cache import LayerCache, cache_rows
from vllm_h2o.policy import Term
from vllm_h2o.worker.terms import PromptTerms

BLOCKS = torch.tensor([3, 1], dtype=torch.int32)


def chunk(start: int, stop: int) -> PromptChunk:
    """Tokens of a prompt in two pages."""
    return PromptChunk(
        tokens=slice(0, stop - start),
        block_table=BLOCKS,
        resident_start=start,
        logical_start=start,
    )


def score(cache: LayerCache, length: int, more: float) -> None:
    """Give every token of the prompt so much."""
    view = cache.score[cache_rows(BLOCKS, cache.num_kv_heads)].flatten(1, 2)
    view[:, :length] += more
    cache.score[cache_rows(BLOCKS, cache.num_kv_heads)] = view.unflatten(1, (2, -1))


def test_chunks_add_up() -> None:
    """Each term has what scores grew by since the one before it, in all chunks; then anew."""
    cache, terms = filled(SHAPE, 4, 0), PromptTerms()
    chunks = [chunk(0, 12), chunk(12, 24)]
    number(cache, [chunks[-1]])
    for _ in range(2):
        cache.score.zero_()
        for part in chunks:
            for more, which in ((1.0, None), (0.25, Term("rotated", "max"))):
                score(cache, part.attended_len, more)
                terms.add("layer", cache, [part], which)
        score(cache, 24, 4.0)
        terms.add("layer", cache, chunks[-1:], Term("window", "max"))
        found = terms.of(3, ["layer", "layer"])
        twice, once = torch.full((2, 2, 12), 2.0), torch.ones(2, 2, 12)
        expected = {
            "attention": torch.cat([twice, once], dim=-1),
            "second pass": torch.cat([twice, once], dim=-1) / 4,
            "observation window": torch.full((2, 2, 24), 4.0),
        }
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
