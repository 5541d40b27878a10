# SPDX-License-Identifier: Apache-2.0
"""A victim is merged into the nearest key of its KV head, before the new token takes its slot.

Twin of ``merge.nearest`` and ``merge.merged``, batched over requests and KV heads.
"""

from __future__ import annotations

import torch

from vllm_h2o.kernels.batch import DecodeBatch
from vllm_h2o.kernels.cache import LayerCache


def merge_victims(
    cache: LayerCache,
    batch: DecodeBatch,
    rows: torch.Tensor,
    length: torch.Tensor,
    slot: torch.Tensor,
    threshold: float,
) -> None:
    """Let the nearest key of each KV head take in what a new token overwrites.

    Args:
        cache: K, V and masses are written, of the slots that take a victim in.
        batch: the requests; those that overwrite have victims.
        rows: [B, H, P], int64: rows of the cache.
        length: [B, H], int64: slots that hold tokens.
        slot: [B, H], int64: the victims'.
        threshold: what the cosine must exceed.

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
    near = best > threshold**2 * own.square().sum(dim=3).squeeze(2)
    at = torch.stack([survivor, victim])[:, near]  # [2, merged]
    page = torch.stack([rows, rows])[:, near].gather(2, (at // cache.block_size)[..., None])
    where = (page.squeeze(2), at % cache.block_size)
    mass = cache.mass[where]
    for view in (cache.key, cache.value):
        mean = (mass[..., None] * view[where].to(torch.float32)).sum(0) / mass.sum(0)[:, None]
        view[where[0][0], where[1][0]] = mean.to(view.dtype)
    cache.mass[where[0][0], where[1][0]] = mass.sum(0)
