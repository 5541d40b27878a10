"""Survivors of a prompt: which they are, and their move.

Twin of ``reference.pack_survivors``, batched over KV heads. Also what copies survivors out of pages
that other requests read, for every set of kernels.
"""

from __future__ import annotations

import torch

from vllm_h2o.kernels.batch import PromptChunk, Scoring
from vllm_h2o.kernels.cache import LayerCache, cache_rows
from vllm_h2o.kernels.torch.prefill import chunk_rows, chunk_slots

PLAIN = Scoring()


def pack_survivors(
    cache: LayerCache,
    chunk: PromptChunk,
    scoring: Scoring = PLAIN,
    score: torch.Tensor | None = None,
) -> None:
    """Move each KV head's survivors into slots [0, num_survivors), in order of position.

    Args:
        cache: rewritten: in place, or in the pages ``chunk.destination_blocks``.
        chunk: the last chunk of a prompt.
        scoring: what is ranked.
        score: [H, attended_len], float32, of slots [0, attended_len); None: those of the pages.

    """
    if score is None:
        score = chunk_slots(cache, cache.score, chunk)
    if scoring.reach and chunk.num_survivors < chunk.attended_len:
        score = reached(score, chunk_slots(cache, cache.position, chunk), scoring.reach)
    survivor = _select_survivors(cache, chunk, scoring, score)
    rows = chunk_rows(cache, chunk)
    destination = rows
    if chunk.destination_blocks is not None:
        destination = cache_rows(chunk.destination_blocks, cache.num_kv_heads)
    source = _at(rows, survivor, cache.block_size)
    slots = torch.arange(chunk.num_survivors, device=survivor.device).expand_as(survivor)
    target = _at(destination, slots, cache.block_size)
    for view in (cache.key, cache.value, cache.position):
        view[target] = view[source]
    cache.score[target] = score.gather(1, survivor)


def reached(score: torch.Tensor, position: torch.Tensor, reach: int) -> torch.Tensor:
    """[H, L]: of each token the largest score of its own and of ``reach`` positions before it.

    Args:
        score: [H, L].
        position: [H, L], ascending: a prompt's slots are in order of position.
        reach: positions.

    """
    largest = score.clone()
    for distance in range(1, min(reach, score.shape[1] - 1) + 1):
        near = position[:, distance:] - position[:, :-distance] <= reach
        before = score[:, :-distance].masked_fill(~near, float("-inf"))
        largest[:, distance:] = torch.maximum(largest[:, distance:], before)
    return largest


def _select_survivors(
    cache: LayerCache, chunk: PromptChunk, scoring: Scoring, score: torch.Tensor
) -> torch.Tensor:
    """[H, num_survivors]: slots, ascending.

    Sinks and the recent window survive, then the best scores; of equals, the older ones. Where
    pages are ranked, tokens are by the sum of their page's scores.
    """
    position = chunk_slots(cache, cache.position, chunk).to(torch.int64)
    length, block_size = chunk.attended_len, cache.block_size
    if scoring.by_age:
        score = score / (chunk.logical_end - position)
    if scoring.by_page:
        whole = torch.nn.functional.pad(score, (0, -length % block_size))
        sums = whole.unflatten(1, (-1, block_size)).sum(dim=2)
        score = sums.repeat_interleave(block_size, dim=1)[:, :length]
    safe = (position >= chunk.recent_start) | (position < chunk.num_sinks)
    ranked = score.masked_fill(safe, float("inf"))
    # Slots of a prompt are in order of position: a stable sort leaves the older of equals in front.
    best = ranked.sort(dim=1, descending=True, stable=True).indices[:, : chunk.num_survivors]
    return best.sort(dim=1).values


def _at(rows: torch.Tensor, slot: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, offset) of each slot."""
    return rows.gather(1, slot // size), slot % size
