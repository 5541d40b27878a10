# SPDX-License-Identifier: Apache-2.0
"""Rotates heads by a number of positions: ``rope(embed(x, i), n) = embed(x, i + n)``.

Queries of a rotated term are rotated to later positions; keys to earlier ones, where positions
roll: then the sines are those of the opposite angles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rope:
    """A rotary embedding's own rotation (arXiv 2104.09864).

    Args:
        table: [num_positions, R], contiguous: of each distance R / 2 cosines, and as many sines.
            The first R elements of a head are rotated, the others left as they are.
        is_neox: whether the elements of a pair are R / 2 apart, or next to each other.

    """

    table: torch.Tensor
    is_neox: bool

    @property
    def size(self) -> int:
        """R: elements of a head that are rotated; 0: none are."""
        return self.table.shape[1]

    def __call__(self, x: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        """Rotate heads.

        Args:
            x: [..., D], float32 or float64.
            distance: integers in [0, num_positions), of the first dimensions of ``x``.

        Returns:
            [..., D], the dtype of ``x``.

        """
        size = self.size
        turn = self.table[distance].to(x.dtype)
        cos, sin = turn.view(*distance.shape, *[1] * (x.dim() - distance.dim() - 1), size).chunk(
            2, -1
        )
        pairs = x[..., :size].unflatten(-1, (2, -1) if self.is_neox else (-1, 2))
        first, second = pairs.unbind(-2 if self.is_neox else -1)
        both = (first * cos - second * sin, second * cos + first * sin)
        rotated = torch.stack(both, -2 if self.is_neox else -1).flatten(-2)
        return torch.cat([rotated, x[..., size:]], dim=-1)

    def reach(self, distance: int, end: int) -> int:
        """Rotate a token that far, or as far as the model's positions reach.

        Args:
            distance: positions.
            end: one past the position of the last token that is rotated.

        Returns:
            Positions, at least 0.

        """
        return max(min(distance, len(self.table) - end), 0)
