"""One new token for each of B requests: store, attend, score, select.

Twins of ``reference.Strip.store``, ``attend_and_score`` and ``select_victims``, batched over
requests and KV heads. L = P * N slots of the longest request.
"""

from __future__ import annotations

import torch

from vllm_h2o.kernels.batch import DecodeBatch, Scoring, page_rows
from vllm_h2o.kernels.cache import Page

PLAIN = Scoring()


def new_slots(batch: DecodeBatch, victims: torch.Tensor) -> torch.Tensor:
    """[B, H], int64: the slot that each head's new token takes."""
    refilled = victims[batch.owner].to(torch.int64) + batch.order("refill")[:, None]
    overwrites = batch.order("overwrites").bool()
    return torch.where(overwrites[:, None], refilled, batch.order("attended")[:, None] - 1)


def store(
    page: Page,
    batch: DecodeBatch,
    slot: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score: torch.Tensor | None,
) -> None:
    """Write the new token of each request into its slot of each KV head.

    Args:
        page: written.
        batch: the requests.
        slot: [B, H], int64.
        key: [B, H, D].
        value: [B, H, D].
        score: [B, H], float32: first scores; zeros when None.

    """
    rows = page_rows(batch.table, page.num_kv_heads)
    row = rows.gather(2, (slot // page.block_size)[:, :, None]).squeeze(2)
    offset = slot % page.block_size
    page.key[row, offset] = key.to(page.key.dtype)
    page.value[row, offset] = value.to(page.value.dtype)
    page.position[row, offset] = batch.order("position").to(torch.int32)[:, None].expand_as(row)
    page.score[row, offset] = torch.zeros_like(row, dtype=torch.float32) if score is None else score


def attend_and_score(
    page: Page,
    batch: DecodeBatch,
    slot: torch.Tensor,
    query: torch.Tensor,
    scale: float,
    scoring: Scoring,
) -> torch.Tensor:
    """Attend to the resident slots and add what the query gives them to their scores.

    Args:
        page: read; scores written.
        batch: the requests.
        slot: [B, H], int64: of the new tokens; the hole lies behind it.
        query: [B, Hq, D].
        scale: of the logits.
        scoring: what is added.

    Returns:
        [B, Hq, D], float32.

    """
    rows = page_rows(batch.table, page.num_kv_heads)
    num_requests, num_kv_heads, num_pages = rows.shape
    length, head_size = num_pages * page.block_size, query.shape[-1]
    key = page.key[rows].view(num_requests, num_kv_heads, length, head_size).to(torch.float32)
    value = page.value[rows].view(key.shape).to(torch.float32)
    slots, attended = torch.arange(length, device=query.device), batch.order("attended")
    hidden = (slots >= attended[:, None])[:, None, :].expand(key.shape[:3])
    if scoring.by_page:
        behind = slots - slot[:, :, None]
        hidden = hidden | ((behind > 0) & (behind <= batch.order("hole")[:, None, None]))
    grouped = query.view(num_requests, num_kv_heads, -1, head_size).to(torch.float32)
    logits = torch.matmul(grouped * scale, key.transpose(-1, -2))
    logits.masked_fill_(hidden[:, :, None, :], float("-inf"))
    probs = torch.softmax(logits, dim=-1)
    # A slot that nobody owns may hold anything, a NaN too, and 0 * NaN is NaN.
    value.masked_fill_(hidden[..., None], 0.0)
    if scoring.power:
        received = probs.pow(scoring.power).sum(dim=2).view(*rows.shape, page.block_size)
        if scoring.skip_recent:
            age = batch.order("position")[:, None, None, None] - page.position[rows]
            received.masked_fill_(age < scoring.skip_recent, 0.0)
        received *= batch.order("scores")[:, None, None, None]
        # A hidden slot of an owned page receives 0; a page that is not owned may be another's.
        first_slot = torch.arange(num_pages, device=query.device) * page.block_size
        own = (first_slot < attended[:, None])[:, None, :].expand_as(rows)
        page.score[rows[own]] += received[own]
    return torch.matmul(probs, value).view(num_requests, -1, head_size)


def select_victims(
    page: Page, batch: DecodeBatch, victims: torch.Tensor, scoring: Scoring = PLAIN
) -> None:
    """For every full request and KV head, the slot that the next token takes.

    The lowest score among positions that are neither sinks nor recent; of equals, the newest.

    Args:
        page: read.
        batch: the requests.
        victims: [num_blocks, H], int32: written for the full ones, by owner.
        scoring: what is ranked; where pages are, the victim is a page's first slot.

    """
    chosen = batch.order("selects").bool()
    rows = page_rows(batch.table[chosen], page.num_kv_heads)
    if rows.shape[0] == 0:
        return
    position = page.position[rows].flatten(2).to(torch.int64)
    score = page.score[rows].flatten(2)
    length = position.shape[-1]
    attended, recent_from, num_sinks = (
        batch.order(name)[chosen, None] for name in ("attended", "recent_from", "num_sinks")
    )
    resident = torch.arange(length, device=rows.device) < attended
    candidate = (
        resident[:, None, :]
        & (position < recent_from[:, :, None])
        & (position >= num_sinks[:, :, None])
    )
    if scoring.by_age:
        score = score / (batch.order("position")[chosen, None, None] + 1 - position)
    if scoring.by_page:
        candidate = candidate.unflatten(2, (-1, page.block_size)).all(dim=3)
        score = score.unflatten(2, (-1, page.block_size)).sum(dim=3)
        position = position[:, :, :: page.block_size]
    ranked = score.masked_fill(~candidate, float("inf"))
    lowest = candidate & (ranked == ranked.amin(dim=-1, keepdim=True))
    newest = torch.where(lowest, position, -1).argmax(dim=-1)
    unit = page.block_size if scoring.by_page else 1
    victims[batch.owner[chosen]] = (newest * unit).to(torch.int32)
