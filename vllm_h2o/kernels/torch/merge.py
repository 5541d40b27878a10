# SPDX-License-Identifier: Apache-2.0
"""A victim is merged into the nearest key of its KV head, before the new token takes its slot.

Twin of ``merge.nearest`` and ``merge.merged``, batched over requests and KV heads.
"""

from __future__ import annotations

import torch

from vllm_h2o.kernels.batch import DecodeBatch, Scoring
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.merge import attention_paid, share_of


def merge_victims(
    cache: LayerCache,
    batch: DecodeBatch,
    rows: torch.Tensor,
    length: torch.Tensor,
    slot: torch.Tensor,
    scoring: Scoring,
) -> None:
    """Let the nearest key of each KV head take in what a new token overwrites.

    Args:
        cache: K, V and masses are written, of the slots that take a victim in.
        batch: the requests; those that overwrite have victims.
        rows: [B, H, P], int64: rows of the cache.
        length: [B, H], int64: slots that hold tokens.
        slot: [B, H], int64: the victims'.
        scoring: what the cosine must exceed, and whether scores are means.

    """
    assert cache.mass is not None
    chosen = batch.field("overwrites").bool()
    rows, length, victim = rows[chosen], length[chosen], slot[chosen]
    if rows.shape[0] == 0:
        return
    key = cache.key[rows].flatten(2, 3).to(torch.float32)  # [B', H, L, D]
    index = torch.arange(key.shape[2], device=key.device)
    other = (index < length[:, :, None]) & (index != victim[:, :, None])
    own = key.gather(2, victim[:, :, None, None].expand(-1, -1, -1, key.shape[3]))
    dots = (key * own).sum(dim=3).clamp_min(0.0)
    square = (dots * dots / key.square().sum(dim=3).clamp_min(1e-30)).masked_fill(~other, -1.0)
    best, survivor = square.max(dim=2)
    near = best > scoring.merge**2 * own.square().sum(dim=3).squeeze(2)
    at = torch.stack([survivor, victim])[:, near]  # [2, merged]
    page = torch.stack([rows, rows])[:, near].gather(2, (at // cache.block_size)[..., None])
    where = (page.squeeze(2), at % cache.block_size)
    mass = weight = cache.mass[where]
    if scoring.by_age:
        end = batch.field("logical_start")[chosen][:, None].expand(near.shape)[near]
        weight = attention_paid(cache.score[where], end - cache.position[where], scoring.power)
    share = share_of(*weight)[:, None]
    for view in (cache.key, cache.value):
        own, other = view[where].to(torch.float32)
        view[where[0][0], where[1][0]] = (own + share * (other - own)).to(view.dtype)
    cache.mass[where[0][0], where[1][0]] = mass.sum(0)
