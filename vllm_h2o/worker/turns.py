# SPDX-License-Identifier: Apache-2.0
"""Before a step: a conversation's next turn gets a copy of what the last one held.

What ended requests held is copied to host memory before a step takes their pages, or to a file,
where the plan says so, and from there to the turns that continue from it. Layers that keep a state
of all tokens have theirs copied likewise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec, is_full_attention_spec

from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.held import Held
from vllm_h2o.wire import Continuation, ResidencyPlan, Saved
from vllm_h2o.worker.after_step import Layers
from vllm_h2o.worker.files import Writer, read
from vllm_h2o.worker.reconstruction import sent

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Tokens:
    """The pages of one of the policy's layers.

    Args:
        cache: the pages.
        num_states: blocks of a request that are not among them: the last ones, which hold states.

    """

    cache: LayerCache
    num_states: int = 0

    def copy(self, copied: Saved | Continuation, blocks: torch.Tensor) -> Held:
        """Copy what a request holds.

        Args:
            copied: the request.
            blocks: [P], integers: all its blocks.

        """
        num_used = copied.num_used if isinstance(copied, Saved) else 0
        return Held.of(self.cache, self._own(blocks), num_used)

    def begin(self, turn: Continuation, blocks: torch.Tensor, held: Held) -> None:
        """Give a request that continues a copy.

        Args:
            turn: the request.
            blocks: [P], integers: all its blocks that take what is copied.
            held: the copy.

        """
        own = self._own(blocks)
        if turn.keeps_slots:
            held.store(self.cache, own, turn.restored_end)
        else:
            held.store_in_order(self.cache, own, turn.num_slots, turn.restored_end)

    def _own(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks[: len(blocks) - self.num_states]


@dataclass(frozen=True)
class States:
    """The states that one layer keeps, each of all tokens of a request.

    Args:
        parts: [blocks, ...], any: a state may have several parts.
        place: of the layer's block among those of a request, from the last one on: 1, 2, ...

    """

    parts: Sequence[torch.Tensor]
    place: int

    def copy(self, copied: Saved | Continuation, blocks: torch.Tensor) -> Held:
        """Copy a request's; see :meth:`Tokens.copy`."""
        own = self._own(blocks)
        return Held({str(index): part[own] for index, part in enumerate(self.parts)})

    def begin(self, turn: Continuation, blocks: torch.Tensor, held: Held) -> None:
        """Give a request that continues a copy; see :meth:`Tokens.begin`."""
        own = self._own(blocks)
        for index, part in enumerate(self.parts):
            part[own] = held.parts[str(index)]

    def _own(self, blocks: torch.Tensor) -> torch.Tensor:
        start = len(blocks) - self.place
        return blocks[start : start + 1]


def pages_of(
    groups: Sequence[KVCacheGroupSpec], context: Mapping[str, Any]
) -> Iterator[Tokens | States]:
    """The pages of each layer: the policy's first, then those with states.

    Args:
        groups: vLLM's groups of layers.
        context: vLLM's layers by name.

    """
    with_states = [group for group in groups if isinstance(group.kv_cache_spec, MambaSpec)]
    for group in groups:
        if is_full_attention_spec(group.kv_cache_spec):  # of whatever shapes: the policy's alone
            for cache in Layers(group.layer_names, context).caches():
                yield Tokens(cache, len(with_states))
    for index, group in enumerate(with_states):
        for name in group.layer_names:
            yield States(context[name].kv_cache, len(with_states) - index)


@dataclass
class Turns:
    """Copies caches of ended requests.

    Args:
        writer: of this worker's files.
        host: copies in host memory by number, each of all layers, in order.

    """

    writer: Writer
    host: dict[int, list[Held]] = field(default_factory=dict)

    @torch.inference_mode()
    def begin(
        self, plan: ResidencyPlan, layers: Sequence[Tokens | States], device: torch.device
    ) -> None:
        """Copy, in every layer: all is read before anything is written.

        Args:
            plan: of the step that begins.
            layers: pages of each, which hold what is copied.
            device: of the pages.

        """
        from_pages = [saved for saved in plan.saved if not isinstance(saved.source, int)]
        each: list[Saved | Continuation] = [*from_pages, *plan.continued.values()]
        sources = [sent(torch.tensor(copied.source), device) for copied in each]
        turns = list(plan.continued.values())
        rows = [sent(torch.tensor(turn.blocks), device) for turn in turns]
        files = {turn.place for turn in turns if isinstance(turn.place, tuple)}
        copies: dict[int | str | tuple[str, ...], list[Held]] = dict(self.host.items())
        copies |= {each: read(each[self.writer.rank]) for each in files}
        copies |= {saved.place: [] for saved in from_pages}
        for index, layer in enumerate(layers):
            begun: list[Held] = []
            for copied, source in zip(each, sources, strict=True):
                if isinstance(copied, Saved):
                    copies[copied.place].append(layer.copy(copied, source).to(HOST))
                elif copied.place is None:
                    begun.append(layer.copy(copied, source))
                else:
                    begun.append(copies[copied.place][index].to(device))
            for turn, blocks, copy in zip(turns, rows, begun, strict=True):
                layer.begin(turn, blocks, copy)
        for saved in plan.saved:
            held = copies[saved.source if isinstance(saved.source, int) else saved.place]
            if isinstance(saved.place, str):
                self.writer.write(saved, held)
            else:
                self.host[saved.place] = held
        for number in plan.dropped:
            del self.host[number]
