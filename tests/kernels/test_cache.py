# SPDX-License-Identifier: Apache-2.0
"""The page layout, byte by byte, and what is refused to be viewed as one."""

from __future__ import annotations

import itertools

import pytest
import torch

from vllm_h2o.kernels.cache import LayerCache

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VIEWS = ("key", "value", "score", "position", "mass")
NUM_BLOCKS, NUM_KV_HEADS = 3, 2


def make_cache(
    dtype: torch.dtype, head_size: int, block_size: int, fill: int = 0, merges: bool = True
) -> torch.Tensor:
    """[num_blocks, num_kv_heads, N, C] of one byte repeated."""
    content = 2 * head_size + (12 if merges else 8) // dtype.itemsize
    shape = (NUM_BLOCKS, NUM_KV_HEADS, block_size, content)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((num_bytes,), fill, dtype=torch.uint8).view(dtype).view(shape)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, [rows, bytes of a row] for what a page's row holds."""
    return tensor.contiguous().view(torch.uint8).flatten(1)


all_layouts = pytest.mark.parametrize(
    ("dtype", "head_size", "block_size"),
    list(itertools.product(DTYPES, [64, 80, 96, 128], [16, 32, 128])),
)


@pytest.mark.parametrize("merges", [False, True])
@all_layouts
def test_row_holds_k_v_scores_positions_and_masses(
    dtype: torch.dtype, head_size: int, block_size: int, merges: bool
) -> None:
    """A row's bytes are K, V, scores, positions and, where tokens are merged, masses.

    Each is dense, in this order, and there is nothing else.
    """
    torch.manual_seed(0)
    num_rows = NUM_BLOCKS * NUM_KV_HEADS
    kv_shape, shape = (num_rows, block_size, head_size), (num_rows, block_size)
    content = {
        "key": torch.randn(kv_shape).to(dtype),
        "value": torch.randn(kv_shape).to(dtype),
        "score": torch.randn(shape),
        "position": torch.randint(-(1 << 31), (1 << 31) - 1, shape).to(torch.int32),
        **({"mass": torch.rand(shape)} if merges else {}),
    }
    cache = make_cache(dtype, head_size, block_size, merges=merges)
    layer_cache = LayerCache.of(cache, head_size, merges=merges)
    assert (layer_cache.mass is not None) is merges
    for name, values in content.items():
        view = getattr(layer_cache, name)
        assert (view.shape, view.dtype) == (values.shape, values.dtype)
        view.copy_(values)
    expected = torch.cat([raw(values) for values in content.values()], dim=1)
    assert torch.equal(cache.view(torch.uint8).view(num_rows, -1), expected)
    assert (layer_cache.block_size, layer_cache.num_blocks, layer_cache.num_kv_heads) == (
        block_size,
        NUM_BLOCKS,
        2,
    )


@pytest.mark.parametrize(("dtype", "kind"), [("float8_e4m3fn", False), ("float8_e5m2", True)])
def test_layout_of_float8(dtype: str, kind: bool) -> None:
    """vLLM binds bytes: K and V are views of them, and the words that follow are aligned."""
    float8, content = getattr(torch, dtype), 2 * 80 + (12 if kind else 8)
    cache = torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, 16, content, dtype=torch.uint8)
    pages = LayerCache.of(cache, 80, keeps_scores=kind, dtype=float8, scales=(0.5, 2.0))
    assert pages.key.dtype == pages.value.dtype == float8
    assert pages.key.shape == pages.value.shape == (NUM_BLOCKS * NUM_KV_HEADS, 16, 80)
    pages.key.fill_(1.0)
    pages.value.fill_(2.0)
    pages.score.fill_(3.0)
    pages.position.fill_(-1)
    rows = cache.view(NUM_BLOCKS * NUM_KV_HEADS, -1)
    assert (rows[:, :1280].view(float8).float() == 1.0).all()
    assert (rows[:, 1280:2560].view(float8).float() == 2.0).all()
    assert (rows[:, 2560:2624].view(torch.float32) == 3.0).all()
    assert (rows[:, 2624:2688].view(torch.int32) == -1).all()
    assert (rows.shape[1] == 2688) is not kind


def test_odd_bytes_are_refused() -> None:
    """Scores begin where 4 bytes do."""
    cache = torch.zeros(1, 1, 5, 2 * 3 + 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="K and V of 5 slots of 3 x 1 bytes are odd"):
        LayerCache.of(cache, 3, dtype=torch.float8_e5m2)


@all_layouts
def test_views_do_not_overlap(dtype: torch.dtype, head_size: int, block_size: int) -> None:
    """Each byte of the cache belongs to exactly one view: filling one changes no other."""
    owners = torch.zeros(make_cache(dtype, head_size, block_size).nbytes, dtype=torch.int)
    for name in VIEWS:
        cache = make_cache(dtype, head_size, block_size, fill=0xA5)
        layer_cache = LayerCache.of(cache, head_size, merges=True)
        before = {other: raw(getattr(layer_cache, other)).clone() for other in VIEWS}
        getattr(layer_cache, name).zero_()
        for other in VIEWS:
            assert torch.equal(raw(getattr(layer_cache, other)), before[other]) is (other != name)
        owners += cache.view(torch.uint8).flatten() != 0xA5
    assert (owners == 1).all()


@all_layouts
def test_rows_are_aligned(dtype: torch.dtype, head_size: int, block_size: int) -> None:
    """Every token's K and V starts at a multiple of 16 bytes, every other number of 4."""
    cache = make_cache(dtype, head_size, block_size)
    layer_cache, base = LayerCache.of(cache, head_size, merges=True), cache.data_ptr()
    for row, slot in itertools.product(range(layer_cache.key.shape[0]), range(block_size)):
        for view in (layer_cache.key, layer_cache.value):
            assert (view[row, slot].data_ptr() - base) % 16 == 0
            assert view[row, slot].is_contiguous()
        assert layer_cache.mass is not None
        for view in (layer_cache.score, layer_cache.position, layer_cache.mass):
            assert (view[row, slot].data_ptr() - base) % 4 == 0


def test_rows_are_blocks_and_heads() -> None:
    """Row ``block_id * num_kv_heads + head`` is that head's part of that block of vLLM's cache."""
    cache = make_cache(torch.float32, 64, 16, merges=False)
    layer_cache = LayerCache.of(cache, 64)
    layer_cache.key[2 * NUM_KV_HEADS + 1] = 1.0
    assert cache[2, 1].count_nonzero() == 16 * 64
    assert cache.count_nonzero() == 16 * 64


def test_a_layer_of_a_larger_tensor() -> None:
    """The cache may be one layer's slice of what vLLM allocated for all."""
    layers = torch.zeros(2, NUM_BLOCKS, NUM_KV_HEADS, 16, 2 * 64 + 4, dtype=torch.bfloat16)
    LayerCache.of(layers[1], 64).position.fill_(-1)
    assert layers[0].count_nonzero() == 0
    assert layers[1].view(torch.int32).count_nonzero() == NUM_BLOCKS * NUM_KV_HEADS * 16


def test_one_head_has_no_order_of_heads() -> None:
    """With one KV head token-major memory is head-major too, whatever its strides say."""
    cache = torch.zeros(NUM_BLOCKS, 16, 1, 2 * 64 + 2).transpose(1, 2)
    LayerCache.of(cache, 64).score.fill_(1.0)
    assert cache.count_nonzero() == NUM_BLOCKS * 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("off_by", [-4, -1, 1, 8])
def test_wrong_content_is_refused(dtype: torch.dtype, off_by: int) -> None:
    """A slot of any other size, stock vLLM's without scores included, is refused with numbers."""
    content = 2 * 64 + 8 // dtype.itemsize + off_by
    cache = torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, 16, content, dtype=dtype)
    slot_bytes = content * dtype.itemsize
    with pytest.raises(ValueError, match=f"a slot of {slot_bytes} bytes does not hold K and V"):
        LayerCache.of(cache, 64)


def test_masses_need_their_bytes() -> None:
    """A page without masses is not taken for one with them, nor the other way round."""
    for merges in (False, True):
        cache = make_cache(torch.bfloat16, 64, 16, merges=merges)
        with pytest.raises(ValueError, match="a slot of 26[48] bytes does not hold K and V of 64"):
            LayerCache.of(cache, 64, merges=not merges)


@pytest.mark.parametrize(
    ("memory", "dims"),
    [
        ((NUM_BLOCKS, 16, NUM_KV_HEADS, 130), (0, 2, 1, 3)),
        ((NUM_KV_HEADS, NUM_BLOCKS, 16, 130), (1, 0, 2, 3)),
        ((NUM_BLOCKS, NUM_KV_HEADS, 130, 16), (0, 1, 3, 2)),
    ],
    ids=["token-major", "heads outermost", "slots innermost"],
)
def test_other_layouts_are_refused(memory: tuple[int, ...], dims: tuple[int, ...]) -> None:
    """Memory in another order is no page, even where its shape is the same."""
    cache = torch.zeros(memory).permute(dims)
    assert cache.shape == (NUM_BLOCKS, NUM_KV_HEADS, 16, 130)
    with pytest.raises(ValueError, match="not head-major and dense: strides"):
        LayerCache.of(cache, 64)


def test_padded_pages_are_refused() -> None:
    """Bytes between pages would shift every row behind them."""
    padded = torch.zeros(NUM_BLOCKS, NUM_KV_HEADS + 1, 16, 130)[:, :NUM_KV_HEADS]
    with pytest.raises(ValueError, match="not head-major and dense: strides"):
        LayerCache.of(padded, 64)
