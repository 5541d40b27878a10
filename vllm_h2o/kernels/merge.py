# SPDX-License-Identifier: Apache-2.0
"""The definition where a victim is merged into the key nearest to it: see reference.py.

Not of the paper. A token that took others in stands for all of them: its K and V are their means,
its *mass* is their number, and its logit gains the logarithm of that: it counts that many times.
Where scores are means, both tokens weigh by the attention that each is paid, else by mass.
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


def attention_paid(score: torch.Tensor, age: torch.Tensor, power: int) -> torch.Tensor:
    """``(score / age) ** (1 / power)``: of squares, the root mean square of probabilities."""
    mean = score / age
    return mean.sqrt() if power == 2 else mean


def share_of(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``other / (own + other)``: a victim's share of the mean; 0 where neither weighs anything."""
    return other / (own + other).clamp_min(torch.finfo(own.dtype).tiny)


def merged(held: torch.Tensor, weight: torch.Tensor, survivor: int, victim: int) -> torch.Tensor:
    """[D]: the mean of two rows of ``held``, [L, D], weighted by ``weight``, [L]."""
    share = share_of(weight[survivor], weight[victim])
    return held[survivor] + share * (held[victim] - held[survivor])
