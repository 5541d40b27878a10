"""Tiles that matrix units take, and no larger than a device's shared memory."""

from __future__ import annotations

import pytest

from vllm_h2o.kernels.triton.sizes import TILE, padded_group, prompt_tiles, tile_of


@pytest.mark.parametrize(("group", "rows"), [(1, 1), (2, 16), (16, 16), (17, 32)])
def test_padded_group(group: int, rows: int) -> None:
    """One query needs no matrix product; of others it has at least 16 rows."""
    assert padded_group(group) == rows


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("padded_head", [64, 128, 256, 512])
def test_tiles(padded_head: int, element_size: int) -> None:
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
