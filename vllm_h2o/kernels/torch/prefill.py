"""A chunk of one request's prompt: store, attend, score.

Twin of ``reference.attend_and_score`` (T > 1), batched over KV heads; and the scores of an
observation window, kept outside the pages where others read those.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_h2o.kernels.batch import PromptChunk, Scoring, StepTensors
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.sinks import SinkLogits
from vllm_h2o.kernels.torch.softmax import softmax
from vllm_h2o.pages import num_pages

QUERY_TILE = 128
"""Queries whose probabilities are held at once: num_heads * QUERY_TILE * length floats."""

MAX_PROBABILITIES = 1 << 26
"""Elements that are held at once, with fewer queries a tile where a prompt is long: 256 MiB."""


def store(
    cache: LayerCache,
    chunk: PromptChunk,
    key: torch.Tensor,
    value: torch.Tensor,
    score: torch.Tensor | None,
) -> None:
    """Write the chunk after the slots in use.

    Args:
        cache: written.
        chunk: the chunk.
        key: [T, H, D].
        value: [T, H, D].
        score: [T, H], float32: initial scores; zeros when None.

    """
    slot = torch.arange(chunk.resident_start, chunk.attended_len, device=key.device)
    row = chunk_rows(cache, chunk)[:, slot // cache.block_size]
    offset = (slot % cache.block_size).expand_as(row)
    position = chunk.logical_start + slot - chunk.resident_start
    stored = cache.as_stored(key.transpose(0, 1), value.transpose(0, 1))
    cache.key[row, offset], cache.value[row, offset] = stored
    cache.position[row, offset] = position.to(torch.int32).expand_as(row)
    zeros = torch.zeros_like(row, dtype=torch.float32)
    cache.score[row, offset] = zeros if score is None else score.T
    if cache.mass is not None:
        cache.mass[row, offset] = 1.0


def attend_and_score(
    cache: LayerCache,
    chunk: PromptChunk,
    query: torch.Tensor,
    scale: float,
    scoring: Scoring,
    sink_logits: SinkLogits = None,
) -> torch.Tensor:
    """Attend causally and add the scoring queries' probabilities to the scores.

    Args:
        cache: read; scores written.
        chunk: the chunk.
        query: [T, Hq, D].
        scale: of the logits.
        scoring: what is added.
        sink_logits: [Hq], float32, of attention sinks.

    Returns:
        [T, Hq, D], float32.

    """
    num_queries, num_heads, head_size = query.shape
    key, value = (chunk_slots(cache, view, chunk).float() for view in (cache.key, cache.value))
    position = chunk_slots(cache, cache.position, chunk)
    columns = torch.zeros(position.shape, device=query.device)
    key_scale, value_scale = cache.scales
    group = num_heads // cache.num_kv_heads
    shape = (cache.num_kv_heads, group, num_queries, head_size)
    out = torch.empty(shape, device=query.device)
    for start in range(0, num_queries, QUERY_TILE):
        stop = min(start + QUERY_TILE, num_queries)
        visible = chunk.resident_start + stop
        index = torch.arange(start, stop, device=query.device)
        last_seen = chunk.resident_start + index
        tile = (query[start:stop], key[:, :visible], last_seen, scale * key_scale)
        probs = probabilities(*tile, sink_logits)
        more_out = torch.matmul(probs.flatten(1, 2), value[:, :visible])  # [H, G * tile, D]
        out[:, :, start:stop] = more_out.unflatten(1, (-1, stop - start))
        if scoring.power and stop > chunk.first_scoring_query:
            scores = slice(max(chunk.first_scoring_query - start, 0), None)
            query_position = chunk.logical_start + index[scores]
            more = contributions(
                probs[:, :, scores], query_position, position[:, :visible], scoring
            )
            columns[:, :visible] = combined(columns[:, :visible], more, scoring)
    if scoring.power:
        add_to_scores(cache, chunk, columns, scoring)
    return out.mul_(value_scale).permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_size)


def score_windows(
    cache: LayerCache, chunks: Sequence[PromptChunk], tensors: StepTensors, scoring: Scoring
) -> None:
    """Keep an observation window's scores outside the pages, where others read those.

    Args:
        cache: read; the chunks are stored.
        chunks: their ``window_scores``, where there are any, are written.
        tensors: the step's.
        scoring: what is added.

    """
    for chunk in chunks:
        if chunk.window_scores is not None:
            asking = (tensors.query[chunk.tokens], tensors.scale, scoring, chunk.first_window_query)
            found = column_scores(cache, chunk, *asking, sink_logits=tensors.sink_logits)
            chunk.window_scores[tensors.layer_index] = found


def column_scores(
    cache: LayerCache,
    chunk: PromptChunk,
    query: torch.Tensor,
    scale: float,
    scoring: Scoring,
    first_query: int,
    sees_all: bool = False,
    sink_logits: SinkLogits = None,
) -> torch.Tensor:
    """Scores that some queries give to every token, with nothing written.

    Args:
        cache: read; the chunk is stored.
        chunk: of a prompt.
        query: [T, Hq, D], of the chunk.
        scale: of the logits.
        scoring: what is added.
        first_query: queries from here on score.
        sees_all: whether they see later tokens than their own, too.
        sink_logits: [Hq], float32, of attention sinks.

    Returns:
        [H, attended_len], float32: sums, or maxima, over the queries and the GQA group.

    """
    key = chunk_slots(cache, cache.key, chunk).to(torch.float32)
    position = chunk_slots(cache, cache.position, chunk)
    columns = torch.zeros(position.shape, device=query.device)
    fitting = MAX_PROBABILITIES // (query.shape[1] * chunk.attended_len)
    tile_size = max(1, min(QUERY_TILE, fitting))
    for start in range(first_query, chunk.num_tokens, tile_size):
        tile = query[start : start + tile_size]
        index = start + torch.arange(len(tile), device=query.device)
        last_seen = chunk.resident_start + index
        if sees_all:
            last_seen = torch.full_like(index, chunk.attended_len - 1)
        probs = probabilities(tile, key, last_seen, scale * cache.scales[0], sink_logits)
        more = contributions(probs, chunk.logical_start + index, position, scoring)
        columns = combined(columns, more, scoring)
    return columns


def probabilities(
    query: torch.Tensor,
    key: torch.Tensor,
    last_seen: torch.Tensor,
    scale: float,
    sink_logits: SinkLogits = None,
) -> torch.Tensor:
    """``softmax(q K^T * scale)`` of a few queries, each over the slots that it sees.

    Args:
        query: [T, Hq, D].
        key: [H, L, D], float32.
        last_seen: [T]: the last slot that each query sees.
        scale: of the logits.
        sink_logits: [Hq], float32, of attention sinks.

    Returns:
        [H, G, T, L], float32: the queries of a GQA group side by side.

    """
    grouped = query.unflatten(1, (key.shape[0], -1)).permute(1, 2, 0, 3).to(torch.float32) * scale
    logits = torch.matmul(grouped.flatten(1, 2), key.transpose(1, 2))  # [H, G * T, L]
    logits = logits.unflatten(1, (-1, query.shape[0]))
    hidden = torch.arange(key.shape[1], device=key.device) > last_seen[:, None]
    sinks = None if sink_logits is None else sink_logits.view(key.shape[0], -1, 1)
    return softmax(logits.masked_fill_(hidden, float("-inf")), sinks)


def contributions(
    probs: torch.Tensor, query_position: torch.Tensor, position: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """What queries add to scores.

    Args:
        probs: [H, G, T, L].
        query_position: [T].
        position: [H, L]: of each token.
        scoring: what is added.

    Returns:
        [H, L]: sums, or maxima, over the queries and the GQA group.

    """
    each = probs.pow(scoring.power)
    if scoring.skip_recent:
        age = query_position[:, None] - position[:, None, :]
        each = each.masked_fill((age < scoring.skip_recent)[:, None], 0.0)
    return each.amax(dim=(1, 2)) if scoring.by_maximum else each.sum(dim=(1, 2))


def combined(one: torch.Tensor, other: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """What two sets of queries give to the same tokens: their sum, or the larger."""
    return torch.maximum(one, other) if scoring.by_maximum else one + other


def chunk_rows(cache: LayerCache, chunk: PromptChunk) -> torch.Tensor:
    """[H, P], int64: rows of the cache that hold the chunk and what precedes it."""
    blocks = chunk.block_table[: num_pages(chunk.attended_len, cache.block_size)]
    return cache.rows(blocks)


def chunk_slots(cache: LayerCache, view: torch.Tensor, chunk: PromptChunk) -> torch.Tensor:
    """[H, attended_len, ...]: a copy of the chunk's slots, and of those before it, in one view."""
    return view[chunk_rows(cache, chunk)].flatten(1, 2)[:, : chunk.attended_len]


def add_to_scores(
    cache: LayerCache, chunk: PromptChunk, columns: torch.Tensor, scoring: Scoring
) -> None:
    """Add [H, attended_len] to the scores of the slots up to the chunk's end."""
    slot = torch.arange(chunk.attended_len, device=columns.device)
    row = chunk_rows(cache, chunk)[:, slot // cache.block_size]
    at = (row, (slot % cache.block_size).expand_as(row))
    cache.score[at] = combined(cache.score[at], columns, scoring)
