"""A chunk of one request's prompt: store, attend, score.

Twin of ``reference.attend_and_score`` (T > 1), batched over KV heads.
"""

from __future__ import annotations

import torch

from vllm_h2o.kernels.batch import PromptChunk, Scoring
from vllm_h2o.kernels.cache import Page
from vllm_h2o.kernels.torch.pack import QUERY_TILE, given, own_rows, probabilities


def store(
    page: Page,
    chunk: PromptChunk,
    key: torch.Tensor,
    value: torch.Tensor,
    score: torch.Tensor | None,
) -> None:
    """Write the chunk behind the slots in use.

    Args:
        page: written.
        chunk: the chunk.
        key: [T, H, D].
        value: [T, H, D].
        score: [T, H], float32: first scores; zeros when None.

    """
    slot = torch.arange(chunk.start, chunk.end, device=key.device)
    row = own_rows(page, chunk)[:, slot // page.block_size]
    offset = (slot % page.block_size).expand_as(row)
    position = chunk.position + slot - chunk.start
    page.key[row, offset] = key.transpose(0, 1).to(page.key.dtype)
    page.value[row, offset] = value.transpose(0, 1).to(page.value.dtype)
    page.position[row, offset] = position.to(torch.int32).expand_as(row)
    page.score[row, offset] = (
        torch.zeros_like(row, dtype=torch.float32) if score is None else score.T
    )


def attend_and_score(
    page: Page, chunk: PromptChunk, query: torch.Tensor, scale: float, scoring: Scoring
) -> torch.Tensor:
    """Attend causally and add what the scoring queries give to the scores.

    Args:
        page: read; scores written.
        chunk: the chunk.
        query: [T, Hq, D].
        scale: of the logits.
        scoring: what is added.

    Returns:
        [T, Hq, D], float32.

    """
    num_kv_heads = page.num_kv_heads
    num_queries, num_heads, head_size = query.shape
    shape = (num_kv_heads, -1, head_size)
    rows = own_rows(page, chunk)
    key = page.key[rows].view(shape)[:, : chunk.end].to(torch.float32)
    value = page.value[rows].view(shape)[:, : chunk.end].to(torch.float32)
    position = page.position[rows].flatten(1)[:, : chunk.end]
    received = torch.zeros(num_kv_heads, chunk.end, device=query.device)
    group = num_heads // num_kv_heads
    out = torch.empty(num_kv_heads, group, num_queries, head_size, device=query.device)
    for first in range(0, num_queries, QUERY_TILE):
        last = min(first + QUERY_TILE, num_queries)
        visible = chunk.start + last
        asked = torch.arange(first, last, device=query.device)
        probs = probabilities(query[first:last], key[:, :visible], chunk.start + asked, scale)
        out[:, :, first:last] = torch.matmul(probs.flatten(1, 2), value[:, :visible]).unflatten(
            1, (-1, last - first)
        )
        if scoring.power and last > chunk.scores_from:
            scores = slice(max(chunk.scores_from - first, 0), None)
            from_here = chunk.position + asked[scores]
            received[:, :visible] += given(
                probs[:, :, scores], from_here, position[:, :visible], scoring
            )
    if scoring.power:
        slot = torch.arange(chunk.end, device=query.device)
        row = rows[:, slot // page.block_size]
        page.score[row, (slot % page.block_size).expand_as(row)] += received
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_size)
