# SPDX-License-Identifier: Apache-2.0
"""The value of each term of the ranking, of a prompt's tokens: for traces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from vllm_h2o.kernels.batch import PromptChunk
from vllm_h2o.kernels.cache import LayerCache, first_slots
from vllm_h2o.policy import Term

NAMES = {
    "all": "attention",
    "window": "observation window",
    "rotated": "second pass",
    "reread": "second pass",
}
"""The name of a term on the page of a trace, by its queries."""


class PromptTerms:
    """Summed while prompts are scored, by their first block and by layer."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, str], dict[str, torch.Tensor]] = {}

    def add(
        self,
        layer_name: str,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        last: Term | None,
    ) -> None:
        """Take the growth of the chunks' scores for the value of the last term.

        Args:
            layer_name: whose cache it is.
            cache: read.
            chunks: stored and scored.
            last: the term that has just been added; None: the attention that was paid.

        """
        name = NAMES[last.queries if last else "all"]
        for chunk in chunks:
            key = int(chunk.block_table[0]), layer_name
            if last is None and chunk.logical_start == 0:
                self._sums.pop(key, None)
            sums = self._sums.setdefault(key, {})
            shape = (cache.num_kv_heads, chunk.logical_end)
            for term in {*sums, name}:
                own = sums.get(term, cache.score.new_zeros(shape[0], 0))
                sums[term] = pad(own, (0, shape[1] - own.shape[1]))
            at = first_slots(cache, chunk.block_table, chunk.attended_len)
            position = cache.position[at].long()
            so_far = torch.stack([*sums.values()]).sum(0)
            sums[name].scatter_add_(1, position, cache.score[at] - so_far.gather(1, position))

    def of(self, first_block: int, layer_names: Sequence[str]) -> dict[str, torch.Tensor]:
        """[layers, H, tokens], by the term's name: of the last prompt that began there.

        Args:
            first_block: id of the first block of its own.
            layer_names: which layers.

        """
        each = [self._sums.get((first_block, name), {}) for name in layer_names]
        return {term: torch.stack([sums[term] for sums in each]) for term in each[0]}
