# SPDX-License-Identifier: Apache-2.0
"""A chunk of one request's prompt: store, attend, score.

Twin of ``reference.attend_and_score`` (T > 1), batched over KV heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_h2o.kernels.batch import PromptChunk
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.sinks import SinkLogits
from vllm_h2o.kernels.torch.softmax import softmax
from vllm_h2o.pages import num_pages

QUERY_TILE = 128
"""Most queries whose probabilities are held at once."""

MAX_PROBABILITIES = 1 << 26
"""Elements that are held at once, with fewer queries a tile where a prompt is long: 256 MiB."""


def store(cache: LayerCache, chunk: PromptChunk, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write the chunk after the slots in use; its tokens' scores are 0.

    Args:
        cache: written.
        chunk: the chunk.
        key: [T, H, D].
        value: [T, H, D].

    """
    slot = torch.arange(chunk.resident_start, chunk.attended_len, device=key.device)
    row = chunk_rows(cache, chunk)[:, slot // cache.block_size]
    offset = (slot % cache.block_size).expand_as(row)
    position = chunk.logical_start + slot - chunk.resident_start
    stored = cache.as_stored(key.transpose(0, 1), value.transpose(0, 1))
    cache.key[row, offset], cache.value[row, offset] = stored
    cache.position[row, offset] = position.to(torch.int32).expand_as(row)
    cache.score[row, offset] = 0.0
    if cache.mass is not None:
        cache.mass[row, offset] = 1.0


def attend_and_score(
    cache: LayerCache,
    chunk: PromptChunk,
    query: torch.Tensor,
    scale: float,
    power: int,
    sink_logits: SinkLogits = None,
) -> torch.Tensor:
    """Attend causally and add the scoring queries' probabilities to the scores.

    Args:
        cache: read; scores written.
        chunk: stored.
        query: [T, Hq, D].
        scale: of the logits.
        power: of the probabilities that are added; 0 adds nothing.
        sink_logits: [Hq], float32, of attention sinks.

    Returns:
        [T, Hq, D], float32.

    """
    num_queries, num_heads, head_size = query.shape
    key, value = (chunk_slots(cache, view, chunk).float() for view in (cache.key, cache.value))
    columns = torch.zeros(key.shape[:2], device=query.device, dtype=torch.float32)
    key_scale, value_scale = cache.scales
    group = num_heads // cache.num_kv_heads
    shape = (cache.num_kv_heads, group, num_queries, head_size)
    out = torch.empty(shape, device=query.device, dtype=torch.float32)
    for tile in tiles(chunk, num_heads):
        visible = chunk.resident_start + tile.stop
        index = torch.arange(tile.start, tile.stop, device=query.device)
        last_seen = chunk.resident_start + index
        seen = (key[:, :visible], last_seen, scale * key_scale, sink_logits)
        probs = probabilities(query[tile], *seen)
        more_out = torch.matmul(probs.flatten(1, 2), value[:, :visible])  # [H, G * tile, D]
        out[:, :, tile] = more_out.unflatten(1, (-1, len(index)))
        if power and tile.stop > chunk.first_scoring_query:
            scoring = probs[:, :, max(chunk.first_scoring_query - tile.start, 0) :]
            columns[:, :visible] += scoring.pow(power).sum(dim=(1, 2))
    if power:
        add_to_scores(cache, chunk, columns)
    return out.mul_(value_scale).permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_size)


def tiles(chunk: PromptChunk, num_heads: int, first_query: int = 0) -> Iterator[slice]:
    """Queries of a chunk, from ``first_query`` on, whose probabilities are held at once.

    Args:
        chunk: the chunk.
        num_heads: Hq.
        first_query: in [0, T].

    """
    fitting = MAX_PROBABILITIES // (num_heads * chunk.attended_len)
    size = max(1, min(QUERY_TILE, fitting))
    for start in range(first_query, chunk.num_tokens, size):
        yield slice(start, min(start + size, chunk.num_tokens))


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
        sink_logits: [Hq] or [T, Hq], float32, of attention sinks.

    Returns:
        [H, G, T, L], float32: the queries of a GQA group side by side.

    """
    grouped = query.unflatten(1, (key.shape[0], -1)).permute(1, 2, 0, 3).to(torch.float32) * scale
    logits = torch.matmul(grouped.flatten(1, 2), key.transpose(1, 2))  # [H, G * T, L]
    logits = logits.unflatten(1, (-1, query.shape[0]))
    hidden = torch.arange(key.shape[1], device=key.device) > last_seen[:, None]
    sinks = sink_logits
    if sinks is not None:
        sinks = sinks.expand(query.shape[:2]).T.unflatten(0, (key.shape[0], -1))  # [H, G, T]
    return softmax(logits.masked_fill_(hidden, float("-inf")), sinks)


def chunk_rows(cache: LayerCache, chunk: PromptChunk) -> torch.Tensor:
    """[H, P], int64: rows of the cache that hold the chunk and what precedes it."""
    blocks = chunk.block_table[: num_pages(chunk.attended_len, cache.block_size)]
    return cache.rows(blocks)


def chunk_slots(cache: LayerCache, view: torch.Tensor, chunk: PromptChunk) -> torch.Tensor:
    """[H, attended_len, ...]: a copy of the chunk's slots, and of those before it, in one view."""
    return view[chunk_rows(cache, chunk)].flatten(1, 2)[:, : chunk.attended_len]


def add_to_scores(cache: LayerCache, chunk: PromptChunk, columns: torch.Tensor) -> None:
    """Add [H, attended_len] to the scores of the slots up to the chunk's end."""
    slot = torch.arange(chunk.attended_len, device=columns.device)
    row = chunk_rows(cache, chunk)[:, slot // cache.block_size]
    cache.score[row, (slot % cache.block_size).expand_as(row)] += columns
