# SPDX-License-Identifier: Apache-2.0
"""Terms of a ranking that are added once, when a chunk of the prompt is stored.

Twin of ``reference.score_term``, batched over KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from vllm_h2o.kernels.batch import PromptChunk, StepTensors
from vllm_h2o.kernels.cache import LayerCache, first_slots
from vllm_h2o.kernels.torch.prefill import add_to_scores, chunk_slots, probabilities, tiles
from vllm_h2o.policy import Term


def score_term(
    cache: LayerCache, chunk: PromptChunk, tensors: StepTensors, term: Term, by_age: bool
) -> None:
    """``score[j] += weight * (age[j] if by_age else 1) * value[j]`` up to the chunk's end.

    Args:
        cache: the chunk is stored; scores are written, or ``chunk.window_scores``.
        chunk: of a prompt.
        tensors: of the step; see :func:`rotated`.
        term: whose value is added.
        by_age: whether scores are ranked as means.

    """
    keep_scores(cache, chunk, term)
    position = chunk_slots(cache, cache.position, chunk)
    age = chunk.logical_end - position if by_age else 1
    added = term.weight * age * values(cache, chunk, tensors, term, position)
    added[:, : chunk.first_scored_slot] = 0.0
    if chunk.window_scores is None:
        add_to_scores(cache, chunk, added)
    else:
        chunk.window_scores[tensors.layer_index] = added


def keep_scores(cache: LayerCache, chunk: PromptChunk, term: Term) -> None:
    """Before a term with a lifetime is added: keep each token's score without it.

    Scores hold the term while it counts, and survivors move with both. So the sum of a large score
    and small ones need not be undone.
    """
    if not term.lifetime or cache.score_without_window is None:
        return
    at = first_slots(cache, chunk.block_table, chunk.attended_len)
    cache.score_without_window[at] = cache.score[at]


def rotated(chunks: Sequence[PromptChunk], tensors: StepTensors, term: Term) -> StepTensors:
    """A step's tensors with the queries that a term has: those of a rotated one past chunks' ends.

    Args:
        chunks: whose queries they are.
        tensors: of the step.
        term: any.

    """
    rope, query = tensors.rotates(term), tensors.query
    if rope is None:
        return tensors
    found = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for chunk in chunks:
        own = query[chunk.tokens].to(torch.float32)
        by = rope.reach(chunk.shift, chunk.logical_end)
        distance = torch.full(own.shape[:1], by, device=own.device)
        found[chunk.tokens] = rope(own, distance).to(query.dtype)
    return replace(tensors, query=found)


def values(
    cache: LayerCache,
    chunk: PromptChunk,
    tensors: StepTensors,
    term: Term,
    position: torch.Tensor,
) -> torch.Tensor:
    """[H, attended_len], float32: the term's value of every token, with nothing written.

    Args:
        cache: read; the chunk is stored.
        chunk: of a prompt.
        tensors: of the step.
        term: which queries count, and how they are reduced; a mean is reduced as a sum.
        position: [H, attended_len], of the tokens.

    """
    query, sinks = tensors.query[chunk.tokens], tensors.sink_logits
    if sinks is not None:
        sinks = sinks.expand(tensors.query.shape[:2])[chunk.tokens]
    key = chunk_slots(cache, cache.key, chunk).to(torch.float32)
    value = torch.zeros(position.shape, device=query.device, dtype=torch.float32)
    for tile in tiles(chunk, query.shape[1], chunk.first_query(term)):
        index = torch.arange(tile.start, tile.stop, device=query.device)
        last_seen = chunk.resident_start + index
        if term.sees_later:
            last_seen = torch.full_like(index, chunk.attended_len - 1)
        others = None if sinks is None else sinks[tile]
        seen = (key, last_seen, tensors.scale * cache.scales[0], others)
        each = probabilities(query[tile], *seen).pow(term.power)  # [H, G, tile, L]
        if term.skip:
            age = chunk.logical_start + index[:, None] - position[:, None, :]
            each = each.masked_fill((age < term.skip)[:, None], 0.0)
        if term.reduce == "max":
            value = torch.maximum(value, each.amax(dim=(1, 2)))
        else:
            value += each.sum(dim=(1, 2))
    return reached(value, position, term.reach)


def reached(value: torch.Tensor, position: torch.Tensor, reach: int) -> torch.Tensor:
    """[H, L]: of each token the largest value of its own and of ``reach`` positions before it.

    Args:
        value: [H, L].
        position: [H, L], ascending: a prompt's slots are in order of position.
        reach: positions.

    """
    largest = value.clone()
    for distance in range(1, min(reach, value.shape[1] - 1) + 1):
        near = position[:, distance:] - position[:, :-distance] <= reach
        before = value[:, :-distance].masked_fill(~near, float("-inf"))
        largest[:, distance:] = torch.maximum(largest[:, distance:], before)
    return largest
