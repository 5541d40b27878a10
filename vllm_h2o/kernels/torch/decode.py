# SPDX-License-Identifier: Apache-2.0
"""One new token for each of B requests: store, attend, score, select.

Twins of ``reference.Strip.store``, ``attend_and_score`` and ``select_victim``, batched over
requests and KV heads. L = P * N slots of the longest strip.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_h2o.kernels.batch import DecodeBatch
from vllm_h2o.kernels.cache import LayerCache, cache_rows
from vllm_h2o.kernels.sinks import SinkLogits
from vllm_h2o.kernels.torch.softmax import softmax
from vllm_h2o.pages import num_pages


@dataclass(frozen=True)
class Strips:
    """Where the KV heads of a batch lie.

    Args:
        rows: [B, H, P], int64: rows of the cache; past a head's own they are another head's of its
            request, or free.
        length: [B, H], int64: slots that are attended to.

    """

    rows: torch.Tensor
    length: torch.Tensor

    @classmethod
    def of(cls, cache: LayerCache, batch: DecodeBatch) -> Strips:
        """The strips of every request; heads that share slots have lengths of their own."""
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
    return torch.where(overwrites, victim, strips.length - 1)


def store(
    cache: LayerCache,
    batch: DecodeBatch,
    strips: Strips,
    slot: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Write the new token of each request into its slot of each KV head; its score is 0.

    Args:
        cache: written.
        batch: the requests.
        strips: the requests'.
        slot: [B, H], int64.
        key: [B, H, D].
        value: [B, H, D].

    """
    row = strips.rows.gather(2, (slot // cache.block_size)[:, :, None]).squeeze(2)
    offset = slot % cache.block_size
    position = batch.field("logical_start").to(torch.int32)
    cache.key[row, offset], cache.value[row, offset] = cache.as_stored(key, value)
    cache.position[row, offset] = position[:, None].expand_as(row)
    cache.score[row, offset] = 0.0
    if cache.mass is not None:
        cache.mass[row, offset] = 1.0


def attend_and_score(
    cache: LayerCache,
    batch: DecodeBatch,
    strips: Strips,
    query: torch.Tensor,
    scale: float,
    power: int,
    sink_logits: SinkLogits = None,
) -> torch.Tensor:
    """Attend to the resident slots and add the query's probabilities to their scores.

    Args:
        cache: read; scores written.
        batch: the requests.
        strips: the requests'.
        query: [B, Hq, D].
        scale: of the logits.
        power: of the probabilities that are added; 0 adds nothing.
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
    grouped = query.view(num_requests, num_kv_heads, -1, head_size).to(torch.float32)
    key_scale, value_scale = cache.scales
    logits = torch.matmul(grouped * (scale * key_scale), key.transpose(-1, -2))  # [B, H, G, L]
    if cache.mass is not None:
        logits += cache.mass[rows].flatten(2)[:, :, None, :].log()
    logits.masked_fill_(hidden[:, :, None, :], float("-inf"))
    sinks = None if sink_logits is None else sink_logits.view(num_kv_heads, -1)
    probs = softmax(logits, sinks)
    # A free slot may hold anything, a NaN too, and 0 * NaN is NaN.
    value.masked_fill_(hidden[..., None], 0.0)
    if power:
        _add_scores(cache, batch, strips, probs.pow(power))
    return torch.matmul(probs, value).mul_(value_scale).view(num_requests, -1, head_size)


def _add_scores(cache: LayerCache, batch: DecodeBatch, strips: Strips, each: torch.Tensor) -> None:
    """Add what each query head contributes, [B, H, G, L], to the scores of the pages."""
    rows = strips.rows
    added = each.sum(dim=2).view(*rows.shape, cache.block_size)  # [B, H, P, N]
    added *= batch.field("scores")[:, None, None, None]
    # A hidden slot of an owned page gets 0; a page that is not owned may be another's.
    page_start = torch.arange(rows.shape[2], device=rows.device) * cache.block_size
    own = page_start < strips.length[:, :, None]  # [B, H, P]
    cache.score[rows[own]] += added[own]


def select_victims(
    cache: LayerCache,
    batch: DecodeBatch,
    strips: Strips,
    victims: torch.Tensor,
    by_age: bool = False,
) -> None:
    """For every full request and KV head, the slot that the next token takes.

    The lowest score among positions that are neither sinks nor recent; of equals, the newest.

    Args:
        cache: read.
        batch: the requests.
        strips: the requests'.
        victims: [num_blocks, H], int32: written for the full ones, by first block.
        by_age: whether a score is divided by the token's age.

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
    if by_age:
        score = score / (batch.field("logical_start")[chosen, None, None] + 1 - position)
    ranked = score.masked_fill(~candidate, float("inf"))
    lowest = candidate & (ranked == ranked.amin(dim=-1, keepdim=True))
    newest = torch.where(lowest, position, -1).argmax(dim=-1)
    victims[batch.first_block_ids[chosen]] = newest.to(torch.int32)
