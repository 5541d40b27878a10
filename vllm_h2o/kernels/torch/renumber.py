"""What is resident gets positions by rank: a text may be longer than the model was trained on.

Twin of ``strip.Strip.renumber``, batched over KV heads; for every set of kernels, because it is
rare: once in as many tokens as there are positions beyond what is resident.
"""

from __future__ import annotations

import torch

from vllm_h2o.kernels.cache import LayerCache, first_slots
from vllm_h2o.kernels.strip import Rotation


@torch.inference_mode()
def renumber(
    cache: LayerCache,
    blocks: torch.Tensor,
    num_slots: int,
    end: int,
    rotate_back: Rotation,
    accumulates: bool = False,
) -> None:
    """Give the tokens of one request positions [0, num_slots) in each KV head, in their order.

    Args:
        cache: K, positions and, with ``accumulates``, scores are written.
        blocks: [P], integers: the request's, which hold its slots.
        num_slots: those in use.
        end: one past the position of the newest token, before.
        rotate_back: what the layer's rotary embedding makes of a key some positions earlier.
        accumulates: whether scores are of attention, as sums or means: a token keeps what it got
            per query, as if it had been stored as many queries ago as it has tokens after it now,
            itself among them.

    """
    at = first_slots(cache, blocks, num_slots)
    position = cache.position[at].to(torch.int64)  # [H, num_slots]
    rank = position.argsort(dim=1).argsort(dim=1)
    rotated = rotate_back(cache.key[at].to(torch.float32), position - rank)
    cache.key[at] = rotated.to(cache.key.dtype)
    cache.position[at] = rank.to(torch.int32)
    if accumulates:
        cache.score[at] *= (num_slots - rank) / (end - position)
