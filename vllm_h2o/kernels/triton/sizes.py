# SPDX-License-Identifier: Apache-2.0
"""How large tiles are, and with what options the kernels are launched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from vllm_h2o.kernels.programs import PROGRAMS

TILE = 64
"""Slots that a decode program holds at once, at most."""
SINGLE_TILE = 32
"""The same, where a KV head has one query head."""
STORE_TILE = 32
"""Tokens that a program stores or moves at once."""
SELECT_TILE = 1024
"""Slots that a program ranks at once, where survivors are selected."""
PAGE_LANES = 512
"""Slots that a program scores at once, after a decode: in whole pages, or parts of a larger one."""
MAX_KV_SPLITS = 32
"""Programs that one (request, KV head) is divided among, at most."""
SPLIT_SLOTS = 1024
"""Slots of a split, at least, where a request has more splits than all have: a program takes about
as long for them as the bytes of the smallest batch that fills a device."""
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


def merge_registers(padded_head: int, element_size: int, group: int) -> dict[str, int]:
    """Options of the launch that merges splits: eight programs share a multiprocessor."""
    spills_little = padded_head * element_size <= 256 and group <= 4
    return {"maxnreg": MAX_REGISTERS // 2} if spills_little else {}


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
    """Programs that the slots of any (request, KV head) are divided among, long or short.

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


def num_spare(num_programs: int, num_kv_heads: int, num_kv_splits: int, num_slots: int) -> int:
    """Programs of each KV head for further splits of the longest requests: see strips.split_of.

    They fill half the device: so many are enough to divide any batch into splits of at most twice
    what each program had if all that run at once shared its slots alike.

    Args:
        num_programs: that run at once.
        num_kv_heads: H.
        num_kv_splits: of every request.
        num_slots: of the longest, at the most.

    Returns:
        0 where no request may have more splits than every other.

    """
    can_be_long = num_slots > num_kv_splits * SPLIT_SLOTS and num_kv_splits < MAX_KV_SPLITS
    return num_programs // (2 * num_kv_heads) if can_be_long else 0


def splits_of(lengths: Sequence[int], num_kv_splits: int, spare: int) -> list[int]:
    """Splits of each request: the definition, of which ``strips.split_of`` is the twin.

    They need no more spare programs than there are.

    Args:
        lengths: slots of each request; 0: padding.
        num_kv_splits: of every request.
        spare: programs of each KV head for further ones; 0: there are none.

    """
    if not spare:
        return [num_kv_splits] * len(lengths)
    size = max(SPLIT_SLOTS, -(-sum(lengths) // spare))
    return [max(num_kv_splits, min(-(-length // size), MAX_KV_SPLITS)) for length in lengths]


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
