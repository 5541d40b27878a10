# SPDX-License-Identifier: Apache-2.0
"""Work after the forward pass, in the one order in which it runs.

The first piece precedes sampling. The others precede the next step's forward pass, and no token
waits for them::

    1 unroll     positions that rolled are given back to the model runner, as indices
    2 reread     the model reads the step's prompts a second time: scores are complete
    3 pack       survivors move to the first slots, or out of pages that other requests read
    4 restore    where a term's lifetime ends, tokens get the scores that they have without it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vllm_h2o.errors import IntegrityError
from vllm_h2o.kernels.batch import PromptChunk, Scoring
from vllm_h2o.kernels.cache import LayerCache, first_slots
from vllm_h2o.kernels.interface import Kernels

MAX_SCORES = 1 << 22
"""Scores that are held at once while survivors are copied out of pages that others read: 16 MiB."""


class Work(Protocol):
    """One thing to do after the forward pass."""

    def run(self) -> None:
        """Do it, in every layer."""


@dataclass
class AfterStep:
    """The work of one step, in order; None where a step has none of a kind."""

    unroll: Work | None = None
    reread: Work | None = None
    pack: Work | None = None
    restore: Work | None = None

    def add(self, name: str, work: Work | None) -> None:
        """Enter work of one kind.

        Raises:
            IntegrityError: when there is some already: metadata was built twice in a step.

        """
        if work is None:
            return
        if getattr(self, name) is not None:
            raise IntegrityError(f"a step has two pieces of work to {name}")
        setattr(self, name, work)

    def run_before_sampling(self) -> None:
        """Give positions back: the sampler and the next step's preparation read the runner's."""
        if self.unroll is not None:
            self.unroll.run()

    def run(self) -> None:
        """Run the rest."""
        for work in (self.reread, self.pack, self.restore):
            if work is not None:
                work.run()


@dataclass(frozen=True)
class Layers:
    """The attention layers of the policy's group.

    Args:
        names: of the layers, in the order of the chunks' ``window_scores``.
        context: vLLM's attention layers by name, those of other groups among them.

    """

    names: Sequence[str]
    context: Mapping[str, Any]

    def caches(self) -> list[LayerCache]:
        """The pages of each layer, in order."""
        own = [self.context[name] for name in self.names]
        return [layer.impl.cache_of(layer.kv_cache) for layer in own]


@dataclass(frozen=True)
class Packing:
    """Survivors of a step's requests move together.

    A request that falls back to its budget past its prompt, or evicts several tokens at a time, has
    a chunk of one token here.

    Args:
        chunks: each with survivors.
        layers: whose caches are packed.
        kernels: what moves survivors.
        scoring: how tokens are ranked.

    """

    chunks: list[PromptChunk]
    layers: Layers
    kernels: Kernels
    scoring: Scoring

    @torch.inference_mode()
    def run(self) -> None:
        """Move them, in every layer."""
        caches = self.layers.caches()
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
        """Pack as in one layer that has the KV heads of all: layers share slots."""
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
        """Copy out of shared pages; a few layers at a time where scores are not held already."""
        if chunk.window_scores is not None:
            self.kernels.copy_survivors(caches, chunk, self.scoring, chunk.window_scores)
            return
        size = max(1, MAX_SCORES // (caches[0].num_kv_heads * chunk.attended_len))
        for i in range(0, len(caches), size):
            some = caches[i : i + size]
            at = [first_slots(cache, chunk.block_table, chunk.attended_len) for cache in some]
            scores = [cache.score[where] for cache, where in zip(some, at, strict=True)]
            self.kernels.copy_survivors(some, chunk, self.scoring, torch.stack(scores))


@dataclass(frozen=True)
class Restoring:
    """Requests for which a term's lifetime ends with this step.

    Args:
        blocks: [P], int32: of these requests.
        prompt_ends: [P], int64: tokens of the prompt, of each block's request.
        layers: whose scores are restored.
        kernels: what restores them.

    """

    blocks: torch.Tensor
    prompt_ends: torch.Tensor
    layers: Layers
    kernels: Kernels

    @torch.inference_mode()
    def run(self) -> None:
        """Rank the prompts' tokens without the term, in every layer."""
        for cache in self.layers.caches():
            self.kernels.restore_scores(cache, self.blocks, self.prompt_ends)
