"""One new token for each of B requests: store, attend, score, select.

Twins of ``reference.Strip.store``, ``attend_and_score`` and ``select_victim``, batched over
requests and KV heads. L = P * N slots of the longest strip.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_h2o.kernels.batch import DecodeBatch, Scoring
from vllm_h2o.kernels.cache import LayerCache, cache_rows
from vllm_h2o.kernels.sinks import SinkLogits
from vllm_h2o.kernels.torch.softmax import softmax
from vllm_h2o.pages import num_pages

PLAIN = Scoring()


@dataclass(frozen=True)
class Strips:
    """Where the KV heads of a batch lie.

    Args:
        rows: [B, H, P], int64: rows of the cache; those past a head's own are of its request, too,
            or nobody's.
        length: [B, H], int64: slots that are attended to, less the free ones.

    """

    rows: torch.Tensor
    length: torch.Tensor

    @classmethod
    def of(cls, cache: LayerCache, batch: DecodeBatch) -> Strips:
        """Those of every request; heads that share slots have lengths of their own."""
        block_size, row_step = cache.block_size, cache.rows_per_block
        rows = cache.rows(batch.block_table)
        length = batch.field("attended_len")[:, None].expand(rows.shape[:2])
        split = batch.field("split").bool()
        if cache.first_rows is None or not split.any():
            return cls(rows, length)
        bounds = cache.first_rows[batch.first_block_ids].to(torch.int64)  # [B, H + 1]
        length = torch.where(split[:, None], bounds.diff() * block_size, length)
        page = torch.arange(num_pages(int(length.max()), block_size), device=rows.device)
        head = cache.first_head + torch.arange(cache.num_kv_heads, device=rows.device)
        first = torch.where(split[:, None], bounds[:, :-1], head)[:, :, None]
        flat = first + page * torch.where(split, 1, row_step)[:, None, None]  # [B, H, P]
        # A request's rows, block after block.
        rows = cache_rows(batch.block_table, row_step).transpose(1, 2).flatten(1)
        flat = flat.clamp_(max=rows.shape[1] - 1)
        return cls(rows.gather(1, flat.flatten(1)).view(flat.shape), length)


def new_slots(batch: DecodeBatch, victims: torch.Tensor, strips: Strips) -> torch.Tensor:
    """[B, H], int64: the slot that each head's new token takes."""
    victim = victims[batch.first_block_ids].to(torch.int64)
    overwrites = batch.field("overwrites").bool()[:, None]
    next_offset = batch.field("next_offset")[:, None]
    return torch.where(overwrites, victim + next_offset, strips.length - 1)


def store(
    cache: LayerCache,
    batch: DecodeBatch,
    strips: Strips,
    slot: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score: torch.Tensor | None,
) -> None:
    """Write the new token of each request into its slot of each KV head.

    Args:
        cache: written.
        batch: the requests.
        strips: theirs.
        slot: [B, H], int64.
        key: [B, H, D].
        value: [B, H, D].
        score: [B, H], float32: initial scores; zeros when None.

    """
    row = strips.rows.gather(2, (slot // cache.block_size)[:, :, None]).squeeze(2)
    offset = slot % cache.block_size
    position = batch.field("logical_start").to(torch.int32)
    cache.key[row, offset], cache.value[row, offset] = cache.as_stored(key, value)
    cache.position[row, offset] = position[:, None].expand_as(row)
    zeros = torch.zeros_like(row, dtype=torch.float32)
    cache.score[row, offset] = zeros if score is None else score
    if cache.mass is not None:
        cache.mass[row, offset] = 1.0


def attend_and_score(
    cache: LayerCache,
    batch: DecodeBatch,
    strips: Strips,
    slot: torch.Tensor,
    query: torch.Tensor,
    scale: float,
    scoring: Scoring,
    sink_logits: SinkLogits = None,
) -> torch.Tensor:
    """Attend to the resident slots and add the query's probabilities to their scores.

    Args:
        cache: read; scores written.
        batch: the requests.
        strips: theirs.
        slot: [B, H], int64: of the new tokens; free slots follow it.
        query: [B, Hq, D].
        scale: of the logits.
        scoring: what is added.
        sink_logits: [Hq], float32, of attention sinks.

    Returns:
        [B, Hq, D], float32.

    """
    rows = strips.rows
    num_requests, num_kv_heads, longest = rows.shape
    length, head_size = longest * cache.block_size, query.shape[-1]
    shape = (num_requests, num_kv_heads, length, head_size)
    key = cache.key[rows].view(shape).to(torch.float32)
    value = cache.value[rows].view(shape).to(torch.float32)
    slots = torch.arange(length, device=query.device)
    hidden = slots >= strips.length[:, :, None]  # [B, H, L]
    if scoring.by_page:
        distance = slots - slot[:, :, None]
        num_free = batch.field("num_free_slots")[:, None, None]
        hidden = hidden | ((distance > 0) & (distance <= num_free))
    grouped = query.view(num_requests, num_kv_heads, -1, head_size).to(torch.float32)
    key_scale, value_scale = cache.scales
    logits = torch.matmul(grouped * (scale * key_scale), key.transpose(-1, -2))  # [B, H, G, L]
    if cache.mass is not None:
        logits += cache.mass[rows].flatten(2)[:, :, None, :].log()
    logits.masked_fill_(hidden[:, :, None, :], float("-inf"))
    sinks = None if sink_logits is None else sink_logits.view(num_kv_heads, -1)
    probs = softmax(logits, sinks)
    # A slot that nobody owns may hold anything, a NaN too, and 0 * NaN is NaN.
    value.masked_fill_(hidden[..., None], 0.0)
    if scoring.power:
        _add_scores(cache, batch, strips, probs, scoring)
    return torch.matmul(probs, value).mul_(value_scale).view(num_requests, -1, head_size)


def _add_scores(
    cache: LayerCache,
    batch: DecodeBatch,
    strips: Strips,
    probs: torch.Tensor,
    scoring: Scoring,
) -> None:
    """Add probabilities, [B, H, G, L], to the scores of the pages."""
    rows = strips.rows
    each = probs.pow(scoring.power)
    in_prompt = batch.field("in_prompt").bool()[:, None, None, None]
    added = each.sum(dim=2).view(*rows.shape, cache.block_size)  # [B, H, P, N]
    if scoring.by_maximum:
        added = torch.where(in_prompt, each.amax(dim=2).view(added.shape), added)
    if scoring.skip_recent:
        age = batch.field("logical_start")[:, None, None, None] - cache.position[rows]
        added.masked_fill_(age < scoring.skip_recent, 0.0)
    added *= batch.field("scores")[:, None, None, None]
    # A hidden slot of an owned page gets 0; a page that is not owned may be another's.
    page_start = torch.arange(rows.shape[2], device=rows.device) * cache.block_size
    own = page_start < strips.length[:, :, None]  # [B, H, P]
    held = cache.score[rows[own]]
    new = held + added[own]
    if scoring.by_maximum:
        slots = page_start[:, None] + torch.arange(cache.block_size, device=rows.device)
        live = slots < strips.length[:, :, None, None]  # [B, H, P, N]
        largest = (in_prompt & live).expand_as(added)[own]
        new = torch.where(largest, torch.maximum(held, added[own]), new)
    cache.score[rows[own]] = new


def select_victims(
    cache: LayerCache,
    batch: DecodeBatch,
    strips: Strips,
    victims: torch.Tensor,
    scoring: Scoring = PLAIN,
) -> None:
    """For every full request and KV head, the slot that the next token takes.

    The lowest score among positions that are neither sinks nor recent; of equals, the newest.

    Args:
        cache: read.
        batch: the requests.
        strips: theirs.
        victims: [num_blocks, H], int32: written for the full ones, by first block.
        scoring: what is ranked; where pages are, the victim is a page's first slot.

    """
    chosen = batch.field("selects").bool()
    rows = strips.rows[chosen]
    if rows.shape[0] == 0:
        return
    position = cache.position[rows].flatten(2).to(torch.int64)  # [B', H, L]
    score = cache.score[rows].flatten(2)
    length = position.shape[-1]
    recent_start, num_sinks = (
        batch.field(name)[chosen, None] for name in ("recent_start", "num_sinks")
    )
    candidate = (
        (torch.arange(length, device=rows.device) < strips.length[chosen][:, :, None])
        & (position < recent_start[:, :, None])
        & (position >= num_sinks[:, :, None])
    )
    if scoring.by_age:
        score = score / (batch.field("logical_start")[chosen, None, None] + 1 - position)
    if scoring.by_page:
        candidate = candidate.unflatten(2, (-1, cache.block_size)).all(dim=3)
        score = score.unflatten(2, (-1, cache.block_size)).sum(dim=3)
        position = position[:, :, :: cache.block_size]
    ranked = score.masked_fill(~candidate, float("inf"))
    lowest = candidate & (ranked == ranked.amin(dim=-1, keepdim=True))
    newest = torch.where(lowest, position, -1).argmax(dim=-1)
    unit = cache.block_size if scoring.by_page else 1
    victims[batch.first_block_ids[chosen]] = (newest * unit).to(torch.int32)
