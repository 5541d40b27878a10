# SPDX-License-Identifier: Apache-2.0
"""The definition where a victim is merged into the key nearest to it: see reference.py.

Not of the paper. A token that took others in stands for all of them: its K and V are their means,
its *mass* is their number, and its logit gains the logarithm of that: it counts that many times.
"""

from __future__ import annotations

import torch


def nearest(key: torch.Tensor, victim: int, threshold: float) -> int | None:
    """The slot that takes a victim in: the largest cosine; of equals, the lowest slot.

    Args:
        key: [L, D], as stored: rotated; the victim's among them.
        victim: its slot.
        threshold: what the cosine must exceed.

    Returns:
        The slot; None where no other key is near enough, and the victim is dropped.

    """
    cosine = cosines(key, victim)
    cosine[victim] = -torch.inf
    best = int(cosine.argmax())
    return best if cosine[best] > threshold else None


def cosines(key: torch.Tensor, victim: int) -> torch.Tensor:
    """[L]: of each key, [L, D], and the victim's; 0 where either is zero."""
    length = key.norm(dim=1)
    return (key @ key[victim]) / (length * length[victim]).clamp_min(torch.finfo(key.dtype).tiny)


def merged(held: torch.Tensor, mass: torch.Tensor, survivor: int, victim: int) -> torch.Tensor:
    """[D]: the mean of two rows of ``held``, [L, D], weighted by ``mass``, [L]."""
    total = mass[survivor] + mass[victim]
    return (mass[survivor] * held[survivor] + mass[victim] * held[victim]) / total
