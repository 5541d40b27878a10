"""One new token for each of B requests: store, attend, score, select.

Twins of ``reference.Strip.store``, ``attend_and_score`` and ``select_victims``, batched over
requests and KV heads.
"""

from __future__ import annotations

import torch

from vllm_h2o.kernels.batch import DecodeBatch
from vllm_h2o.kernels.page import Page


def store(
    page: Page,
    batch: DecodeBatch,
    victims: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score: torch.Tensor | None,
) -> None:
    """Write the new token of each request into its slot of each KV head.

    Args:
        page: written.
        batch: the requests.
        victims: [num_blocks, H], int32: slots of the victims, by owner.
        key: [B, H, D].
        value: [B, H, D].
        score: [B, H], float32: first scores; zeros when None.

    """
    slot = torch.where(
        batch.overwrites[:, None],
        victims[batch.owner].to(torch.int64),
        batch.append_slot[:, None],
    )
    row = batch.rows.gather(2, (slot // page.block_size)[:, :, None]).squeeze(2)
    offset = slot % page.block_size
    page.key[row, offset] = key.to(page.key.dtype)
    page.value[row, offset] = value.to(page.value.dtype)
    page.position[row, offset] = batch.position.to(torch.int32)[:, None].expand_as(row)
    page.score[row, offset] = torch.zeros_like(row, dtype=torch.float32) if score is None else score


def attend_and_score(
    page: Page, batch: DecodeBatch, query: torch.Tensor, scale: float, accumulate: bool
) -> torch.Tensor:
    """Attend to the resident slots and add the probabilities to their scores.

    Args:
        page: read; scores written when ``accumulate``.
        batch: the requests.
        query: [B, Hq, D].
        scale: of the logits.
        accumulate: whether probabilities are added to the scores.

    Returns:
        [B, Hq, D], float32.

    """
    num_requests, num_kv_heads, num_pages = batch.rows.shape
    length = num_pages * page.block_size
    head_size = query.shape[-1]
    shape = (num_requests, num_kv_heads, length, head_size)
    key = page.key[batch.rows].view(shape).to(torch.float32)
    value = page.value[batch.rows].view(shape).to(torch.float32)
    hidden = torch.arange(length, device=query.device) >= batch.attended[:, None]
    grouped = query.view(num_requests, num_kv_heads, -1, head_size).to(torch.float32)
    logits = torch.matmul(grouped * scale, key.transpose(-1, -2))
    logits.masked_fill_(hidden[:, None, None, :], float("-inf"))
    probs = torch.softmax(logits, dim=-1)
    # A slot that nobody owns may hold anything, a NaN too, and 0 * NaN is NaN.
    value.masked_fill_(hidden[:, None, :, None], 0.0)
    if accumulate:
        received = probs.sum(dim=2).view(*batch.rows.shape, page.block_size)
        first_slot = torch.arange(num_pages, device=query.device) * page.block_size
        own = (first_slot < batch.attended[:, None])[:, None, :].expand_as(batch.rows)
        page.score[batch.rows[own]] += received[own]
    return torch.matmul(probs, value).view(num_requests, -1, head_size)


def select_victims(page: Page, batch: DecodeBatch, victims: torch.Tensor) -> None:
    """For every full request and KV head, the slot that the next token takes.

    The lowest score among positions that are neither sinks nor recent; of equals, the newest.

    Args:
        page: read.
        batch: the requests.
        victims: [num_blocks, H], int32: written for the full ones, by owner.

    """
    rows = batch.rows[batch.selects]
    if rows.shape[0] == 0:
        return
    position = page.position[rows].flatten(2).to(torch.int64)
    score = page.score[rows].flatten(2)
    length = position.shape[-1]
    resident = torch.arange(length, device=rows.device) < batch.attended[batch.selects][:, None]
    candidate = (
        resident[:, None, :]
        & (position < batch.recent_from[batch.selects][:, None, None])
        & (position >= batch.num_sinks[batch.selects][:, None, None])
    )
    ranked = score.masked_fill(~candidate, float("inf"))
    lowest = candidate & (ranked == ranked.amin(dim=-1, keepdim=True))
    newest = torch.where(lowest, position, -1).argmax(dim=-1)
    victims[batch.owner[batch.selects]] = newest.to(torch.int32)
