"""How large tiles are, and with what options the kernels are launched."""

from __future__ import annotations

import torch
import triton

TILE = 64
"""Slots that a decode program holds at once, at most."""
STORE_TILE = 32
"""Tokens that a program stores or moves at once."""
SELECT_TILE = 1024
"""Slots that a program ranks at once, where survivors are selected."""
PAGE_LANES = 512
"""Slots that a program scores at once, after a decode, in whole pages."""
MAX_KV_SPLITS = 32
"""Programs that one (request, KV head) is divided among, at most."""
NUM_STAGES = {2: 3, 4: 1}
"""Loads in flight of a prompt's kernels, by bytes of an element."""


def padded_group(group: int) -> int:
    """Rows of a matrix product: none where there is one query head, else at least 16."""
    return 1 if group == 1 else max(16, triton.next_power_of_2(group))


def tile_of(padded_head: int, element_size: int) -> int:
    """Slots and queries of a tile, so that the widest heads fit the shared memory of any device."""
    return max(16, min(TILE, TILE * 256 // (padded_head * element_size)))


def prompt_tiles(
    padded_head: int, element_size: int, capability: int
) -> tuple[dict[str, int], dict[str, int]]:
    """How a prompt's kernels are launched, so that few of them spill registers.

    Args:
        padded_head: D_PAD.
        element_size: bytes.
        capability: of the device, 90 for 9.0.

    Returns:
        Options of the kernels that walk the keys of some queries, and of those that walk the
        queries of some keys.

    """
    tile, stages = tile_of(padded_head, element_size), NUM_STAGES[element_size]
    if capability < 80:
        tile = min(tile, 32)
        small = {"TILE_Q": tile, "TILE_K": tile, "num_warps": 8, "num_stages": stages}
        return small, small
    plain = {"TILE_Q": tile, "TILE_K": tile, "num_warps": 4, "num_stages": stages}
    return plain, plain | ({"TILE_K": 2 * tile, "num_warps": 8} if element_size == 2 else {})


def precision(dtype: torch.dtype) -> str:
    """Of matrix products: float32 is not rounded to fewer bits."""
    return "ieee" if dtype == torch.float32 else "tf32"
