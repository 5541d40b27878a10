# SPDX-License-Identifier: Apache-2.0
"""The page layout, in this one place (C++: native/cache.h).

Per (block, KV head), contiguous, N slots of head size D::

    K [N, D] | V [N, D] | score [N] float32 | position [N] int32
        [| mass [N] float32] [| score_without_window [N] float32]

There are masses where victims are merged: see merge.py; and a second score where a term of the
ranking has a lifetime: see torch/rare.py. Elements of K and V may be float8: see float8.py.

A *row* is one (block, KV head): ``row = block_id * rows_per_block + first_head + head``. As a rule
a block has the KV heads of one layer: ``rows_per_block = num_kv_heads``, ``first_head = 0``. Where
layers share slots, it has the KV heads of all layers, one layer after the other.

Page i of a KV head is row ``first_row + i * row_step`` of its request, which counts the rows of its
blocks one block after the other. As a rule each head has its own row of every block: ``first_row =
first_head + head``, ``row_step = rows_per_block``. Where heads share slots, of a layer or of all,
each has its own number of rows, which follow one another: ``row_step = 1``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from vllm_h2o.kernels.float8 import quantised

SHARED_TENTHS, SHARED_TENTHS_OF_ALL = 7, 9
"""Tenths of the slots for heavy hitters that KV heads share, of a layer or of all layers, which go
by how many of the best tokens a head has; heads get equal parts of the rest."""


@dataclass(frozen=True)
class LayerCache:
    """One layer's pages, as views; R = num_blocks * rows_per_block rows of N slots.

    Args:
        key: [R, N, D], the cache's dtype.
        value: [R, N, D], the cache's dtype.
        score: [R, N], float32.
        position: [R, N], int32.
        num_kv_heads: KV heads on this rank.
        first_rows: [num_blocks, H + 1], int32: of a request whose heads share slots, by its first
            block, where each head's rows begin, and where the last one's end. Written when
            survivors are packed, or copied from another request; read by each decode step. None
            where no request's do.
        victims: [num_blocks, H], int32: under a full request's first block, the slot that its next
            token takes in each KV head. Written before it is read: a request becomes full in a step
            that selects, or is copied from one that is. None where no step selects.
        mass: [R, N], float32: tokens that the one in each slot stands for; None where none are
            merged.
        score_without_window: [R, N], float32: of a prompt's token, the score that it gets back when
            the lifetime of a term is over; None where no term has one.
        scales: of keys and of values: what is stored times its scale is what attention reads; ones
            but for float8.
        first_head: of a block's rows, the layer's first.
        num_heads_of_all: KV heads of all layers, where those share slots; 0: they do not.

    """

    key: torch.Tensor
    value: torch.Tensor
    score: torch.Tensor
    position: torch.Tensor
    num_kv_heads: int
    first_rows: torch.Tensor | None = None
    victims: torch.Tensor | None = None
    mass: torch.Tensor | None = None
    score_without_window: torch.Tensor | None = None
    scales: tuple[float, float] = (1.0, 1.0)
    first_head: int = 0
    num_heads_of_all: int = 0

    @property
    def rows_per_block(self) -> int:
        """Rows from one block's to the next one's."""
        return self.num_heads_of_all or self.num_kv_heads

    @property
    def is_quantised(self) -> bool:
        """Whether K and V are float8."""
        return self.key.element_size() == 1

    def as_stored(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New keys and values, each of any shape, in the cache's dtype."""
        dtype = self.key.dtype
        if not self.is_quantised:
            return key.to(dtype), value.to(dtype)
        key_scale, value_scale = self.scales
        return quantised(key, dtype, key_scale), quantised(value, dtype, value_scale)

    @property
    def block_size(self) -> int:
        """Slots of a page, N."""
        return self.key.shape[1]

    @property
    def num_blocks(self) -> int:
        """Pages of the pool."""
        return self.key.shape[0] // self.rows_per_block

    @property
    def shared_tenths(self) -> int:
        """Tenths of the shared slots that go by how many of the best tokens each head has."""
        return SHARED_TENTHS_OF_ALL if self.num_heads_of_all else SHARED_TENTHS

    def rows(self, block_table: torch.Tensor) -> torch.Tensor:
        """[..., H, P], int64, of [..., P] blocks: see :func:`cache_rows`."""
        return cache_rows(block_table, self.num_kv_heads, self.rows_per_block, self.first_head)

    @classmethod
    def of(
        cls,
        kv_cache: torch.Tensor,
        head_size: int,
        splits: bool = False,
        merges: bool = False,
        keeps_scores: bool = False,
        dtype: torch.dtype | None = None,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> LayerCache:
        """View a layer's cache as pages. No copy.

        Args:
            kv_cache: [num_blocks, num_kv_heads, N, C] as vLLM binds it, head-major, where C
                elements hold one slot's K, V, score, position and further words; dense, or of
                blocks that have all layers' rows.
            head_size: D, of K and of V.
            splits: whether heads may share slots; allocates ``first_rows`` then.
            merges: whether slots have masses.
            keeps_scores: whether they have scores without the term that has a lifetime.
            dtype: of K and V, where vLLM binds bytes: float8.
            scales: of keys and of values.

        Raises:
            ValueError: when C has not the size of these, a block's rows are not dense in that
                order, or scores would not begin where 4 bytes do.

        """
        num_blocks, num_kv_heads, block_size, content = kv_cache.shape
        dtype, size = dtype or kv_cache.dtype, kv_cache.element_size()
        num_words = 2 + merges + keeps_scores
        if content * size != 2 * head_size * size + 4 * num_words:
            raise ValueError(
                f"a slot of {content * size} bytes does not hold K and V of {head_size} x {size} "
                f"bytes and {num_words} words, of which the first are score and position"
            )
        if 2 * head_size * block_size * size % 4:
            raise ValueError(f"K and V of {block_size} slots of {head_size} x {size} bytes are odd")
        rows, rows_per_block, first_head = _all_rows(kv_cache)
        split = block_size * head_size
        words = rows.view(torch.float32)
        scores_at = words.shape[1] - num_words * block_size
        starts = range(scores_at, words.shape[1], block_size)
        each = [words[:, at : at + block_size] for at in starts]
        shape = (num_blocks, num_kv_heads + 1)
        shared = kv_cache.new_zeros(shape, dtype=torch.int32) if splits else None
        return cls(
            key=rows[:, :split].unflatten(1, (block_size, head_size)).view(dtype),
            value=rows[:, split : 2 * split].unflatten(1, (block_size, head_size)).view(dtype),
            score=each[0],
            position=each[1].view(torch.int32),
            num_kv_heads=num_kv_heads,
            first_rows=shared,
            victims=kv_cache.new_zeros((num_blocks, num_kv_heads), dtype=torch.int32),
            mass=each[2] if merges else None,
            score_without_window=each[-1] if keeps_scores else None,
            scales=scales,
            first_head=first_head,
            num_heads_of_all=rows_per_block if rows_per_block > num_kv_heads else 0,
        )

    def joined(self) -> LayerCache:
        """The pages of all layers, whose KV heads share slots, as if they were of one.

        Its ``first_rows``, of all heads, are its own, and not written yet.
        """
        num_heads = self.rows_per_block
        shape = (self.num_blocks, num_heads + 1)
        own = torch.empty(shape, dtype=torch.int32, device=self.key.device)
        return replace(self, num_kv_heads=num_heads, first_head=0, first_rows=own)

    def rows_of_split(self, blocks: torch.Tensor) -> list[torch.Tensor]:
        """[P_h], int64, of each KV head h: the rows of a request whose heads share slots.

        Args:
            blocks: [P], integers: the request's.

        """
        assert self.first_rows is not None
        bounds = self.first_rows[blocks[0]].tolist()
        rows = cache_rows(blocks, self.rows_per_block).T.flatten()
        return [rows[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


def _all_rows(kv_cache: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """[num_blocks * rows_per_block, N * C], rows_per_block, and the layer's first head.

    Raises:
        ValueError: when a block's rows are not dense, or not those of whole layers.

    """
    num_blocks, num_kv_heads, block_size, content = kv_cache.shape
    page, strides = block_size * content, kv_cache.stride()
    if not kv_cache[0].is_contiguous() or strides[0] % (num_kv_heads * page):
        raise ValueError(f"the cache is not head-major and dense: strides {strides}")
    rows_per_block, start = strides[0] // page, kv_cache.storage_offset()
    # Layers lie one after the other in each block, from the beginning of vLLM's buffer on.
    first_head = start // page if rows_per_block > num_kv_heads else 0
    shape = (num_blocks * rows_per_block, page)
    rows = kv_cache.as_strided(shape, (page, 1), start - first_head * page)
    return rows, rows_per_block, first_head


def cache_rows(
    block_table: torch.Tensor,
    num_kv_heads: int,
    rows_per_block: int | None = None,
    first_head: int = 0,
) -> torch.Tensor:
    """Rows of a layer's views that hold each KV head's part of some blocks.

    Args:
        block_table: [..., P], integers: block ids.
        num_kv_heads: H.
        rows_per_block: as in :class:`LayerCache`; None: H.
        first_head: likewise.

    Returns:
        [..., H, P], int64.

    """
    heads = torch.arange(num_kv_heads, dtype=torch.int64, device=block_table.device) + first_head
    step = num_kv_heads if rows_per_block is None else rows_per_block
    return block_table.to(torch.int64)[..., None, :] * step + heads[:, None]


def first_slots(
    cache: LayerCache, blocks: torch.Tensor, num_slots: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index into a layer's views, of the first slots of some blocks, for each KV head.

    Args:
        cache: of the layer.
        blocks: [P], integers: block ids.
        num_slots: of the first slots.

    Returns:
        [H, num_slots] rows, and offsets in them.

    """
    rows = cache.rows(blocks)
    slot = torch.arange(num_slots, device=rows.device)
    return rows[:, slot // cache.block_size], (slot % cache.block_size).expand(len(rows), -1)
