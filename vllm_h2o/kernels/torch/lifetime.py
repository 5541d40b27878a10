"""What an observation window gave counts for its lifetime, and is then taken back.

While it lasts, scores hold it, and each slot keeps the score that its token has without it: copied
before the window scores, moved with survivors, and put back in the end. So the sum of a large
score and small ones need not be undone; what a second reading gives later is added to both. A few
launches for each layer, on any device. Twin of ``strip.Strip.keep_scores`` and ``restore_scores``.
"""

from __future__ import annotations

import torch

from vllm_h2o.kernels.batch import PromptChunk
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.torch.prefill import chunk_rows


def keep_scores(cache: LayerCache, chunk: PromptChunk) -> None:
    """Before the window scores: what each token has without it.

    Args:
        cache: its ``score_without_window`` is written.
        chunk: the prompt's last one; its second pass is through.

    """
    assert cache.score_without_window is not None
    rows = chunk_rows(cache, chunk)
    cache.score_without_window[rows] = cache.score[rows]


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
