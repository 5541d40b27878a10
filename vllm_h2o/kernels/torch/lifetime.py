"""What an observation window gave counts for its lifetime, and is then taken back.

While it lasts, scores hold it, and each slot keeps the score that its token has without it: copied
before the window scores, moved with survivors, and put back in the end. So the sum of a large
score and small ones need not be undone; what a second reading gives later is added to both. A few
launches for each layer, on any device. Twin of ``strip.Strip.keep_scores`` and ``restore_scores``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_h2o.kernels.batch import PromptChunk
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.torch.prefill import chunk_rows, chunk_slots
from vllm_h2o.pages import num_pages

PLACES = 1 << 31
"""More than any position."""


def keep_scores(cache: LayerCache, chunk: PromptChunk) -> None:
    """Before the window scores: what each token has without it.

    Args:
        cache: its ``score_without_window`` is written.
        chunk: the prompt's last one; its second pass is through.

    """
    assert cache.score_without_window is not None
    rows = chunk_rows(cache, chunk)
    cache.score_without_window[rows] = cache.score[rows]


@dataclass(frozen=True)
class HeldScores:
    """Those without the window, of one layer and one chunk, before its survivors move.

    Args:
        chunk: whose.
        position: [H * attended_len], int64, ascending: positions, each KV head's after the last's.
        score: [H * attended_len], float32.

    """

    chunk: PromptChunk
    position: torch.Tensor
    score: torch.Tensor

    @classmethod
    def of(cls, cache: LayerCache, chunk: PromptChunk) -> HeldScores:
        """What the slots of a chunk, and those before it, hold."""
        assert cache.score_without_window is not None
        position = chunk_slots(cache, cache.position, chunk).to(torch.int64)
        head = torch.arange(cache.num_kv_heads, device=position.device)[:, None]
        score = chunk_slots(cache, cache.score_without_window, chunk)
        return cls(chunk, (head * PLACES + position).flatten(), score.flatten())

    def move(self, cache: LayerCache) -> None:
        """Give each survivor its own, by the position that its new slot holds."""
        assert cache.score_without_window is not None
        chunk, num_heads = self.chunk, cache.num_kv_heads
        num_blocks = num_pages(chunk.num_survivors + chunk.splits, cache.block_size)
        blocks = chunk.block_table[:num_blocks]
        rows = cache.rows(blocks).T.flatten()
        head = torch.arange(len(rows), device=rows.device)
        if chunk.splits:
            assert cache.first_rows is not None
            # A list of one: as a number, it would be read by the host.
            ends = cache.first_rows[blocks[:1].long()][0, 1:].contiguous()
            head = torch.searchsorted(ends, head.to(ends.dtype), right=True)
        else:
            head = head % num_heads
        wanted = head[:, None] * PLACES + cache.position[rows]
        found = torch.searchsorted(self.position, wanted).clamp_(max=len(self.position) - 1)
        cache.score_without_window[rows] = self.score[found]


def restore_scores(cache: LayerCache, blocks: torch.Tensor, prompt_ends: torch.Tensor) -> None:
    """Give the tokens of prompts the scores that they had without the window.

    Args:
        cache: scores are written.
        blocks: [P], integers: of some requests.
        prompt_ends: [P], integers: tokens of the prompt, of each block's request.

    """
    assert cache.score_without_window is not None
    rows = cache.rows(blocks)  # [H, P]
    of_prompt = cache.position[rows] < prompt_ends[:, None]
    cache.score[rows] = torch.where(of_prompt, cache.score_without_window[rows], cache.score[rows])
