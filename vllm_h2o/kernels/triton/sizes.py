# SPDX-License-Identifier: Apache-2.0
"""How large tiles are, and with what options the kernels are launched."""

from __future__ import annotations

import torch
import triton

TILE = 64
"""Slots that a decode program holds at once, at most."""
SINGLE_TILE = 32
"""The same, where a KV head has one query head."""
STORE_TILE = 32
"""Tokens that a program stores or moves at once."""
PROGRAMS = 4
"""Programs of a decode step that a multiprocessor has registers for."""
SELECT_TILE = 1024
"""Slots that a program ranks at once, where survivors are selected."""
PAGE_LANES = 512
"""Slots that a program scores at once, after a decode: in whole pages, or parts of a larger one."""
MAX_KV_SPLITS = 32
"""Programs that one (request, KV head) is divided among, at most."""
MAX_REGISTERS = 128
"""Registers of a thread where nothing spills: four programs of a decode step share a multiprocessor
then, and two of a prompt's scores."""
NUM_STAGES = {2: 3, 4: 1}
"""Loads in flight of a prompt's kernels, by bytes of an element."""


def kv_shape(block_size: int, head_size: int) -> dict[str, int]:
    """Constants of every kernel that touches K and V."""
    return {"N": block_size, "D": head_size, "D_PAD": triton.next_power_of_2(head_size)}


def page_parts(block_size: int) -> dict[str, int]:
    """Constants of the kernel that scores pages: parts of pages, and how many there are at once."""
    padded = min(triton.next_power_of_2(block_size), PAGE_LANES)
    return {"N_PAD": padded, "CUTS": -(-block_size // padded), "PARTS": PAGE_LANES // padded}


def padded_group(group: int) -> int:
    """Rows of a matrix product: none where there is one query head, else at least 16."""
    return 1 if group == 1 else max(16, triton.next_power_of_2(group))


def tile_of(padded_head: int, element_size: int) -> int:
    """Slots and queries of a tile, so that the widest heads fit the shared memory of any device."""
    return max(16, min(TILE, TILE * 256 // (padded_head * element_size)))


def decode_tile(padded_head: int, element_size: int, group: int) -> int:
    """Slots of a tile of a decode step: a single query head leaves registers to loads ahead."""
    tile = tile_of(padded_head, element_size)
    return min(tile, SINGLE_TILE) if group == 1 else tile


def few_registers(padded_head: int, element_size: int) -> dict[str, int]:
    """Options of a launch whose program gets by with :data:`MAX_REGISTERS`."""
    return {"maxnreg": MAX_REGISTERS} if padded_head * element_size <= 256 else {}


def programs_per_processor(padded_head: int, element_size: int, shared: int) -> int:
    """Count programs of a decode step that run at once, by the tiles on their way.

    Args:
        padded_head: D_PAD.
        element_size: bytes.
        shared: bytes of shared memory of a multiprocessor.

    """
    needed = 2 * TILE * min(padded_head * element_size, 256) + (10 << 10)
    most = PROGRAMS if few_registers(padded_head, element_size) else PROGRAMS // 2
    return max(1, min(most, shared // needed))


def num_splits(num_programs: int, strips: int, num_slots: int) -> int:
    """Programs that the slots of one (request, KV head) are divided among.

    As many as fill the device once; more only if the wave that follows pays for itself.

    Args:
        num_programs: that run at once.
        strips: (requests x KV heads).
        num_slots: of the longest, at the most.

    """
    once = max(1, num_programs // strips)
    more = triton.cdiv(num_programs, strips)
    waves = triton.cdiv(strips * more, num_programs) / triton.cdiv(strips * once, num_programs)
    wanted = more if waves < more / once else once
    return int(max(1, min(wanted, MAX_KV_SPLITS, triton.cdiv(num_slots, TILE))))


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
    if element_size == 4:
        return plain, plain
    by_key = plain | {"TILE_K": 2 * tile, "num_warps": 8}
    return plain, by_key | few_registers(padded_head, element_size)


def precision(dtype: torch.dtype) -> str:
    """Name the precision of matrix products: float32 is not rounded to fewer bits."""
    return "ieee" if dtype == torch.float32 else "tf32"
