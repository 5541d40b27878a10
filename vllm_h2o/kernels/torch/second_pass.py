"""Second-pass scoring: a prompt's queries once more, from positions past its end.

Twin of ``reference.score_second_pass``: every query sees every token, its own and later ones too.
"""

from __future__ import annotations

import torch

from vllm_h2o.kernels.batch import SECOND_PASS_WEIGHT, PromptChunk, Scoring
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.torch.prefill import QUERY_TILE, add_to_scores, chunk_slots, probabilities

MAX_PROBABILITIES = 1 << 26
"""Elements that are held at once, with fewer queries a tile where a prompt is long: 256 MiB."""


def score(
    cache: LayerCache,
    chunk: PromptChunk,
    rotated_query: torch.Tensor,
    scale: float,
    scoring: Scoring,
) -> None:
    """Add the rotated queries' probabilities to the scores of all tokens up to the chunk's end.

    Args:
        cache: the chunk is stored; scores are written.
        chunk: of a prompt.
        rotated_query: [T, Hq, D], its queries at T positions later; those that score are used.
        scale: of the logits.
        scoring: the power of what is added; its mean over all queries so far, as means are ranked.

    """
    if chunk.first_scoring_query >= chunk.num_tokens:
        return
    length, device = chunk.attended_len, rotated_query.device
    key = chunk_slots(cache, cache.key, chunk).to(torch.float32)
    position = chunk_slots(cache, cache.position, chunk)
    column_sums = torch.zeros(position.shape, device=device)
    max_queries = MAX_PROBABILITIES // (rotated_query.shape[1] * length)
    for tile in rotated_query[chunk.first_scoring_query :].split(
        max(1, min(QUERY_TILE, max_queries))
    ):
        last_seen = torch.full((len(tile),), length - 1, device=device)
        probs = probabilities(tile, key, last_seen, scale)  # [H, G, tile, L]
        column_sums += probs.pow(scoring.power).sum(dim=(1, 2))
    age = chunk.logical_end - position
    add_to_scores(cache, chunk, SECOND_PASS_WEIGHT / chunk.logical_end * age * column_sums, scoring)
