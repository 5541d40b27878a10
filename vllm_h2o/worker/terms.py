"""What a prompt's scores are made of: attention that was paid, and each scoring pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from vllm_h2o.kernels.batch import PromptChunk, ScoringPass
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.torch.prefill import chunk_slots


class PromptTerms:
    """Summed while prompts are scored, by their first block and by layer."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, str], dict[str, torch.Tensor]] = {}

    def add(
        self,
        layer_name: str,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        last: ScoringPass | None,
    ) -> None:
        """Take what the chunks' scores have grown by for what the last term gave.

        Args:
            layer_name: whose cache it is.
            cache: read.
            chunks: stored and scored.
            last: the scoring pass that has just run; None: attention itself.

        """
        for chunk in chunks:
            key = int(chunk.block_table[0]), layer_name
            if last is None and chunk.logical_start == 0:
                self._sums.pop(key, None)
            sums = self._sums.setdefault(key, {})
            shape = (cache.num_kv_heads, chunk.logical_end)
            for name in {*sums, _name(last)}:
                own = sums.get(name, cache.score.new_zeros(shape[0], 0))
                sums[name] = pad(own, (0, shape[1] - own.shape[1]))
            score, position = (
                chunk_slots(cache, view, chunk) for view in (cache.score, cache.position)
            )
            at = position.long()
            so_far = torch.stack([*sums.values()]).sum(0)
            sums[_name(last)].scatter_add_(1, at, score - so_far.gather(1, at))

    def of(self, first_block: int, layer_names: Sequence[str]) -> dict[str, torch.Tensor]:
        """[layers, H, tokens], by the term's name: of the last prompt that began there.

        Args:
            first_block: id of the first block of its own.
            layer_names: which layers.

        """
        each = [self._sums.get((first_block, name), {}) for name in layer_names]
        return {term: torch.stack([sums[term] for sums in each]) for term in each[0]}


def _name(which: ScoringPass | None) -> str:
    if which is None:
        return "attention"
    return "second pass" if which.rotated else "observation window"
