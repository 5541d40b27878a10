"""Queries of a prompt that score once more: a second pass, or the observation window's.

Twin of ``reference.score_pass``.
"""

from __future__ import annotations

import torch

from vllm_h2o.kernels.batch import PromptChunk, Scoring, ScoringPass
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.torch.pack import reached
from vllm_h2o.kernels.torch.prefill import (
    QUERY_TILE,
    add_to_scores,
    chunk_slots,
    combined,
    probabilities,
)

MAX_PROBABILITIES = 1 << 26
"""Elements that are held at once, with fewer queries a tile where a prompt is long: 256 MiB."""


def score(
    cache: LayerCache,
    chunk: PromptChunk,
    query: torch.Tensor,
    scale: float,
    scoring_pass: ScoringPass,
) -> None:
    """Add what the pass's queries give to the scores of all tokens up to the chunk's end.

    Args:
        cache: the chunk is stored; scores are written.
        chunk: of a prompt.
        query: [T, Hq, D], its queries, at T positions later in a rotated pass.
        scale: of the logits.
        scoring_pass: which queries score, and what is added.

    """
    first = chunk.first_query(scoring_pass)
    if first >= chunk.num_tokens:
        return
    length, device = chunk.attended_len, query.device
    key = chunk_slots(cache, cache.key, chunk).to(torch.float32)
    position = chunk_slots(cache, cache.position, chunk)
    column = torch.zeros(position.shape, device=device)
    scoring = Scoring(by_maximum=scoring_pass.by_maximum)
    size = max(1, min(QUERY_TILE, MAX_PROBABILITIES // (query.shape[1] * length)))
    for start in range(first, chunk.num_tokens, size):
        tile = query[start : min(start + size, chunk.num_tokens)]
        index = torch.arange(start, start + len(tile), device=device)
        last_seen = chunk.resident_start + index
        if scoring_pass.rotated:
            last_seen = torch.full_like(index, length - 1)
        each = probabilities(tile, key, last_seen, scale).pow(scoring_pass.power)
        more = each.amax(dim=(1, 2)) if scoring_pass.by_maximum else each.sum(dim=(1, 2))
        column = combined(column, more, scoring)
    if scoring_pass.by_maximum:
        column = reached(column, position, scoring_pass.reach)
    else:
        column = column / chunk.logical_end
    age = chunk.logical_end - position
    add_to_scores(cache, chunk, scoring_pass.weight * age * column, Scoring())
