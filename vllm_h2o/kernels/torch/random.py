"""Numbers that rank tokens without attention."""

from __future__ import annotations

import torch

_GOLDEN, _MIX_1, _MIX_2, _MIX_3 = (
    0x9E3779B97F4A7C15,
    0xBF58476D1CE4E5B9,
    0x94D049BB133111EB,
    0xD6E8FEB86659FD93,
)


def _signed(value: int) -> int:
    """The int64 with the bits of ``value`` modulo 2^64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right of int64."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def random_scores(
    seed: torch.Tensor, layer: int, heads: range, position: torch.Tensor
) -> torch.Tensor:
    """Twin of ``reference.random_score``.

    Args:
        seed: [T], int64.
        layer: index of the layer in the whole model.
        heads: indices of the H KV heads in the whole model.
        position: [T], int64.

    Returns:
        [T, H], float32, in [0, 1).

    """
    head = torch.arange(heads.start, heads.stop, dtype=torch.int64, device=position.device)
    state = seed * _signed(_GOLDEN) + _signed(layer * _MIX_1)
    state = (state + position * _signed(_MIX_3))[:, None] + head * _signed(_MIX_2)
    state = (state ^ _shift(state, 30)) * _signed(_MIX_1)
    state = (state ^ _shift(state, 27)) * _signed(_MIX_2)
    return _shift(state ^ _shift(state, 31), 40).to(torch.float32) / (1 << 24)
