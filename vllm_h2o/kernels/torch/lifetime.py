"""What an observation window gave counts for its lifetime, and is then taken back.

While it lasts, scores hold it, and each slot keeps the mean that its token has without it: taken
before the window scores, moved with survivors, and ranked by again in the end. So the sum of a
large score and small ones never has to be undone. A few launches for each layer, on any device.
Twin of ``strip.Strip.keep_means`` and ``restore_means``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_h2o.kernels.batch import PromptChunk
from vllm_h2o.kernels.cache import LayerCache, cache_rows
from vllm_h2o.kernels.torch.prefill import chunk_rows, chunk_slots
from vllm_h2o.pages import num_pages

PLACES = 1 << 31
"""More than any position."""


def keep_means(cache: LayerCache, chunk: PromptChunk) -> None:
    """Before the window scores: what each token is ranked by without it.

    Args:
        cache: its means are written.
        chunk: the prompt's last one; its second pass is through.

    """
    assert cache.mean_without_window is not None
    rows = chunk_rows(cache, chunk)
    age = (chunk.logical_end - cache.position[rows]).clamp_(min=1)  # a free slot may say anything
    cache.mean_without_window[rows] = cache.score[rows] / age


@dataclass(frozen=True)
class HeldMeans:
    """Of one layer and one chunk, before its survivors move.

    Args:
        chunk: whose.
        position: [H * attended_len], int64, ascending: positions, each KV head's after the last's.
        mean: [H * attended_len], float32.

    """

    chunk: PromptChunk
    position: torch.Tensor
    mean: torch.Tensor

    @classmethod
    def of(cls, cache: LayerCache, chunk: PromptChunk) -> HeldMeans:
        """What the slots of a chunk, and those before it, hold."""
        assert cache.mean_without_window is not None
        position = chunk_slots(cache, cache.position, chunk).to(torch.int64)
        head = torch.arange(cache.num_kv_heads, device=position.device)[:, None]
        mean = chunk_slots(cache, cache.mean_without_window, chunk)
        return cls(chunk, (head * PLACES + position).flatten(), mean.flatten())

    def move(self, cache: LayerCache) -> None:
        """Give each survivor its own, by the position that its new slot holds."""
        assert cache.mean_without_window is not None
        chunk, num_heads = self.chunk, cache.num_kv_heads
        num_blocks = num_pages(chunk.num_survivors + chunk.splits, cache.block_size)
        blocks = chunk.block_table[:num_blocks]
        rows = cache_rows(blocks, num_heads).T.flatten()
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
        cache.mean_without_window[rows] = self.mean[found]


def restore_means(cache: LayerCache, blocks: torch.Tensor, ends: torch.Tensor) -> None:
    """Rank the tokens of prompts without the window from now on.

    Args:
        cache: scores are written.
        blocks: [P], integers: of some requests.
        ends: [2, P], integers: of each block's request the tokens of the prompt, and those computed
            so far.

    """
    assert cache.mean_without_window is not None
    rows = cache_rows(blocks, cache.num_kv_heads)  # [H, P]
    position = cache.position[rows]
    prompt_end, logical_end = ends[:, None, :, None]
    score = cache.mean_without_window[rows] * (logical_end - position)
    cache.score[rows] = torch.where(position < prompt_end, score, cache.score[rows])
