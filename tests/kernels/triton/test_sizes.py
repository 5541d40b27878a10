# SPDX-License-Identifier: Apache-2.0
"""Tiles that matrix units take, and no larger than a device's shared memory."""

from __future__ import annotations

import pytest

from vllm_h2o.kernels.programs import PROGRAMS
from vllm_h2o.kernels.triton.sizes import (
    MAX_KV_SPLITS,
    TILE,
    num_splits,
    padded_group,
    programs_per_processor,
    prompt_tiles,
    tile_of,
)


@pytest.mark.parametrize(("group", "rows"), [(1, 1), (2, 16), (16, 16), (17, 32)])
def test_padded_group_is_one_or_at_least_16(group: int, rows: int) -> None:
    """One query needs no matrix product; of others it has at least 16 rows."""
    assert padded_group(group) == rows


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("padded_head", [64, 128, 256, 512])
def test_tiles_fit_the_shared_memory(padded_head: int, element_size: int) -> None:
    """A tile of keys has at most 32 KiB or 16 rows, and older devices get no larger ones."""
    tile = tile_of(padded_head, element_size)
    assert 16 <= tile <= TILE and tile.bit_count() == 1
    assert tile == 16 or tile * padded_head * element_size <= 1 << 15
    for old, new in zip(
        prompt_tiles(padded_head, element_size, 75),
        prompt_tiles(padded_head, element_size, 90),
        strict=True,
    ):
        assert old["TILE_Q"] <= new["TILE_Q"] and old["TILE_K"] <= new["TILE_K"]


@pytest.mark.parametrize(
    ("strips", "splits"),
    [(1, 32), (8, 32), (32, 16), (64, 8), (256, 2), (264, 2), (300, 1), (528, 1), (2048, 1)],
)
def test_splits_fill_whole_waves(strips: int, splits: int) -> None:
    """528 programs at once, as on an H100: no last wave that leaves most of the device idle."""
    assert num_splits(528, strips, 8192) == splits


def test_splits_of_few_slots() -> None:
    """None without a tile of its own; and never more in all than there is room for."""
    assert num_splits(528, 1, 100) == 2
    for programs in (4, 57, 176, 528):
        for strips in range(1, 700):
            splits = num_splits(programs, strips, 1 << 17)
            assert 1 <= splits <= MAX_KV_SPLITS
            assert strips * splits < programs + strips


@pytest.mark.parametrize(
    ("shared", "programs"), [(228 << 10, PROGRAMS), (164 << 10, 3), (100 << 10, 2), (16 << 10, 1)]
)
def test_programs_of_a_multiprocessor(shared: int, programs: int) -> None:
    """As the tiles on their way leave room for."""
    assert programs_per_processor(128, 2, shared) == programs
    assert programs_per_processor(256, 2, shared) == min(programs, PROGRAMS // 2)
