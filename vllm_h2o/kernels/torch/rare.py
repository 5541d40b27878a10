# SPDX-License-Identifier: Apache-2.0
"""Stages that run once in a prompt or a turn, in a few launches a layer, on any device.

Twins of methods of :class:`~vllm_h2o.kernels.strip.Strip`, batched over KV heads:
``restore_scores`` and ``renumber``. What a conversation's next turn is copied with: see held.py.
"""

from __future__ import annotations

import torch

from vllm_h2o.kernels.cache import LayerCache, first_slots
from vllm_h2o.kernels.strip import Rotation


class RareStages:
    """The last two of :class:`~vllm_h2o.kernels.interface.Kernels`."""

    def restore_scores(
        self, cache: LayerCache, blocks: torch.Tensor, prompt_ends: torch.Tensor
    ) -> None:
        """When a term's lifetime is over: give the tokens of prompts the scores without it."""
        assert cache.score_without_window is not None
        rows = cache.rows(blocks)  # [H, P]
        of_prompt = cache.position[rows] < prompt_ends[:, None]
        without = cache.score_without_window[rows]
        cache.score[rows] = torch.where(of_prompt, without, cache.score[rows])

    @torch.inference_mode()
    def renumber(
        self,
        cache: LayerCache,
        blocks: torch.Tensor,
        num_slots: int,
        end: int,
        rotate_back: Rotation,
        accumulates: bool = False,
    ) -> None:
        """Give the tokens of one request positions [0, num_slots) in each KV head, in their order.

        With ``accumulates`` a token keeps its score per query, as if it had been stored as many
        queries ago as its new position says.
        """
        at = first_slots(cache, blocks, num_slots)
        position = cache.position[at].to(torch.int64)  # [H, num_slots]
        rank = position.argsort(dim=1).argsort(dim=1)
        rotated = rotate_back(cache.key[at].to(torch.float32), position - rank)
        cache.key[at] = rotated.to(cache.key.dtype)
        cache.position[at] = rank.to(torch.int32)
        if accumulates:
            cache.score[at] *= (num_slots - rank) / (end - position)
