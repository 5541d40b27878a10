"""Queries of a prompt that score once more: a second pass, or the observation window's.

Twin of ``reference.score_pass``.
"""

from __future__ import annotations

import torch

from vllm_h2o.kernels.batch import PromptChunk, Scoring, ScoringPass
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.sinks import SinkLogits
from vllm_h2o.kernels.torch.pack import reached
from vllm_h2o.kernels.torch.prefill import add_to_scores, chunk_slots, column_scores


def score(
    cache: LayerCache,
    chunk: PromptChunk,
    query: torch.Tensor,
    scale: float,
    scoring_pass: ScoringPass,
    sink_logits: SinkLogits = None,
) -> None:
    """Add what the pass's queries give to the scores of the tokens up to the chunk's end.

    Args:
        cache: the chunk is stored; scores are written.
        chunk: of a prompt.
        query: [T, Hq, D], its queries, at T positions later in a rotated pass.
        scale: of the logits.
        scoring_pass: which queries score, and what is added.
        sink_logits: [Hq], float32, of attention sinks.

    """
    first_query, sees_all = chunk.first_query(scoring_pass), scoring_pass.rotated
    skip_recent, by_maximum = scoring_pass.skip_recent, scoring_pass.by_maximum
    scoring = Scoring(scoring_pass.power, skip_recent, by_maximum=by_maximum)
    asked = (query, scale, scoring, first_query, sees_all, sink_logits)
    column = column_scores(cache, chunk, *asked)
    position = chunk_slots(cache, cache.position, chunk)
    if by_maximum:
        column = reached(column, position, scoring_pass.reach)
    else:
        column = column / chunk.logical_end
    added = scoring_pass.weight * (chunk.logical_end - position) * column
    added[:, : chunk.first_scored_slot] = 0.0
    add_to_scores(cache, chunk, added, Scoring())
