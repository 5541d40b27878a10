# SPDX-License-Identifier: Apache-2.0
"""Copies of what one ended request held, of one layer: a later one continues from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm_h2o.kernels.cache import LayerCache, first_slots


@dataclass(frozen=True)
class HeldTokens:
    """A copy of the slots of one request, of one layer, in order of position.

    Args:
        views: K, V, score and position, [H, num_slots, ...]; scores count as kept.

    """

    views: tuple[torch.Tensor, ...]

    def store(self, cache: LayerCache, blocks: torch.Tensor) -> None:
        """Write it to the first slots of some blocks.

        Args:
            cache: written.
            blocks: [P], integers: the blocks that hold the slots from now on.

        """
        at = first_slots(cache, blocks, self.views[0].shape[1])
        _store(cache, at, self.views)

    def to(self, device: torch.device) -> HeldTokens:
        """The same copy on a device."""
        return HeldTokens(tuple(view.to(device) for view in self.views))

    def parts(self) -> dict[str, torch.Tensor]:
        """The tensors by name."""
        return {str(index): view for index, view in enumerate(self.views)}


@dataclass(frozen=True)
class HeldPages:
    """A copy of the pages of one request whose KV heads share slots, of one layer, as they are.

    Args:
        views: K, V, score and position, [H, P, N, ...]; scores count as kept.
        bounds: [1, H + 1], int32: ``first_rows`` of the request.
        victims: [1, H], int32: the slots that its next token takes.

    """

    views: tuple[torch.Tensor, ...]
    bounds: torch.Tensor
    victims: torch.Tensor

    def store(self, cache: LayerCache, blocks: torch.Tensor) -> None:
        """Write it to as many blocks.

        Args:
            cache: written.
            blocks: [P], integers: the blocks that hold the slots from now on.

        """
        rows = cache.rows(blocks)
        _store(cache, rows, self.views)
        assert cache.first_rows is not None and cache.victims is not None
        cache.first_rows[blocks[:1]], cache.victims[blocks[:1]] = self.bounds, self.victims

    def to(self, device: torch.device) -> HeldPages:
        """The same copy on a device."""
        views = tuple(view.to(device) for view in self.views)
        return HeldPages(views, self.bounds.to(device), self.victims.to(device))

    def parts(self) -> dict[str, torch.Tensor]:
        """The tensors by name."""
        own = {"bounds": self.bounds, "victims": self.victims}
        return {str(index): view for index, view in enumerate(self.views)} | own


Held = HeldTokens | HeldPages
"""Either kind."""


def of_parts(parts: Mapping[str, torch.Tensor]) -> Held:
    """The copy that has these ``parts``."""
    views = tuple(parts[name] for name in sorted(filter(str.isdigit, parts)))
    if "bounds" in parts:
        return HeldPages(views, parts["bounds"], parts["victims"])
    return HeldTokens(views)


def _store(
    cache: LayerCache,
    at: torch.Tensor | tuple[torch.Tensor, ...],
    views: tuple[torch.Tensor, ...],
) -> None:
    """Write K, V, score and position at an index; float8 is moved as it is."""
    cache.key[at], cache.value[at], cache.score[at], cache.position[at] = views
    if cache.score_without_window is not None:
        cache.score_without_window[at] = views[2]
