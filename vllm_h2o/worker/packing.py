"""What a step leaves for its end: the survivors of its prompts move together.

A step carries one :class:`Packing` for each group of layers. It runs when the forward pass is
through, whether that was called or captured in a graph, and before the next step: in every layer
the survivors of a prompt move to its first slots, or out of pages that others read. So do those of
a request that falls back to its budget past its prompt, or evicts every few tokens: its one new
token is a chunk, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_h2o.errors import IntegrityError
from vllm_h2o.kernels.batch import PromptChunk, Scoring
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.kernels.torch.lifetime import restore_scores
from vllm_h2o.kernels.torch.prefill import chunk_slots
from vllm_h2o.worker.random import RandomScores

MAX_SCORES = 1 << 22
"""Scores that are held at once while survivors are copied out of pages that others read: 16 MiB."""


@dataclass(frozen=True)
class Packing:
    """The chunks of one step that survivors are packed of.

    Args:
        chunks: those; each with survivors.
        layer_names: of the group's layers, in the order of the chunks' ``window_scores``.
        layers: vLLM's attention layers, by name; those of other groups among them.
        kernels: what moves survivors.
        scoring: what is ranked.
        random_scores: what ranks where attention does not; None where it does, or nothing ranks.

    """

    chunks: list[PromptChunk]
    layer_names: Sequence[str]
    layers: Mapping[str, Any]
    kernels: Kernels
    scoring: Scoring
    random_scores: RandomScores | None = None

    @torch.inference_mode()
    def run(self) -> None:
        """Move them, in every layer."""
        caches = _caches(self.layer_names, self.layers)
        share, apart = bool(caches[0].num_heads_of_all), self.chunks
        together = [chunk for chunk in self.chunks if share and chunk.splits]
        if together:
            apart = [chunk for chunk in self.chunks if not chunk.splits]
            self._move_together(caches, together)
        in_place = [chunk for chunk in apart if chunk.destination_blocks is None]
        if in_place:
            self.kernels.pack_survivors(caches, in_place, self.scoring)
        for chunk in apart:
            if chunk.destination_blocks is not None:
                self._copy(caches, chunk)

    def _move_together(self, caches: list[LayerCache], chunks: list[PromptChunk]) -> None:
        """Where layers share slots: as in one layer that has the KV heads of all."""
        joined = caches[0].joined()
        if sum(cache.num_kv_heads for cache in caches) != joined.num_kv_heads:
            raise IntegrityError(
                f"layers with {[cache.num_kv_heads for cache in caches]} KV heads are to share "
                f"the slots of {joined.num_kv_heads}"
            )
        assert joined.first_rows is not None
        for chunk in chunks:
            self.kernels.pack_survivors([joined], [chunk], self.scoring)
            block = chunk.block_table[:1].long()
            bounds = joined.first_rows[block]
            for cache in caches:
                assert cache.first_rows is not None
                own = slice(cache.first_head, cache.first_head + cache.num_kv_heads + 1)
                cache.first_rows[block] = bounds[:, own]

    def _copy(self, caches: list[LayerCache], chunk: PromptChunk) -> None:
        """Out of pages that others read; a few layers at a time where nobody holds their scores."""
        if chunk.window_scores is not None and self.random_scores is None:
            self.kernels.copy_survivors(caches, chunk, self.scoring, chunk.window_scores)
            return
        size = max(1, MAX_SCORES // (caches[0].num_kv_heads * chunk.attended_len))
        for i in range(0, len(caches), size):
            some = caches[i : i + size]
            scores = [self._score(chunk, i + at, cache) for at, cache in enumerate(some)]
            self.kernels.copy_survivors(some, chunk, self.scoring, torch.stack(scores))

    def _score(self, chunk: PromptChunk, index: int, cache: LayerCache) -> torch.Tensor:
        """[H, attended_len], of one layer: random, or what the pages say."""
        if self.random_scores is None:
            return chunk_slots(cache, cache.score, chunk)
        name = self.layer_names[index]
        return self.random_scores.up_to(name, chunk, chunk.block_table.device).T


@dataclass(frozen=True)
class Restoring:
    """The requests whose observation window's lifetime ends with a step.

    Args:
        blocks: [P], int32: theirs.
        prompt_ends: [P], int64: of each block's request, tokens of its prompt.
        layer_names: of the group's layers.
        layers: vLLM's attention layers, by name; those of other groups among them.

    """

    blocks: torch.Tensor
    prompt_ends: torch.Tensor
    layer_names: Sequence[str]
    layers: Mapping[str, Any]

    @torch.inference_mode()
    def run(self) -> None:
        """Rank their prompts' tokens without what the window gave, in every layer."""
        for cache in _caches(self.layer_names, self.layers):
            restore_scores(cache, self.blocks, self.prompt_ends)


def _caches(layer_names: Sequence[str], layers: Mapping[str, Any]) -> list[LayerCache]:
    """Of a group's layers, in their order."""
    own = [layers[name] for name in layer_names]
    return [layer.impl.cache_of(layer.kv_cache) for layer in own]
