"""The four names on a GPU: buffers that outlive a step, and the launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from vllm_h2o.kernels.batch import REPLAY_WEIGHT, DecodeBatch, PromptChunk, Scoring
from vllm_h2o.kernels.cache import Page
from vllm_h2o.kernels.triton import decode, pack
from vllm_h2o.kernels.triton import prefill as prompt

TILE = 64
"""Slots that a decode program holds at once."""
STAGES = {2: 3, 4: 1}
"""Loads in flight of a prompt's kernels, by bytes of an element."""
MOST_SHARES = 32
"""Programs that one (request, KV head) is divided among at most."""

PromptAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Page, Sequence[PromptChunk], float, torch.Tensor],
    torch.Tensor,
]
"""(query, key, value, page, chunks, scale, out) -> lse [Hq, T] float32; writes ``out``."""


@dataclass(frozen=True)
class Chunks:
    """Chunks of prompts on the device.

    Args:
        source: what they were made of.
        table: [R, P], int32.
        orders: [len(prompt.CHUNK_ORDERS) or len(pack.PACK_ORDERS), R], int32.

    """

    source: Sequence[PromptChunk]
    table: torch.Tensor
    orders: torch.Tensor

    @classmethod
    def of(
        cls, source: Sequence[PromptChunk], rows: list[list[int]], device: torch.device
    ) -> Chunks:
        """Send the orders, given as rows of integers. No synchronisation."""
        host = torch.tensor(rows, dtype=torch.int32, pin_memory=device.type == "cuda")
        table = torch.stack([chunk.table for chunk in source])
        return cls(source, table, host.to(device, non_blocking=True))

    def __len__(self) -> int:
        return len(self.source)


class TritonKernels:
    """:class:`~vllm_h2o.kernels.interface.Kernels` for one layer's shape on one device.

    Args:
        device: of the tensors.
        max_requests: rows of a decode batch, padding included, at most.
        num_heads: query heads, Hq.
        num_kv_heads: KV heads, H.
        head_size: D.
        prompt_attention: attends prompts; the kernel of our own when None.

    """

    gathers = False

    def __init__(
        self,
        device: torch.device,
        max_requests: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        prompt_attention: PromptAttention | None = None,
    ) -> None:
        self.device, self.max_requests = device, max_requests
        self.num_kv_heads, self.head_size = num_kv_heads, head_size
        self.group = num_heads // num_kv_heads
        self.padded = triton.next_power_of_2(head_size)
        self.prompt_attention = prompt_attention or self._attend
        self._chunks: Chunks | None = None
        # Enough programs to fill the device four times, however few the requests.
        units, self._capability = 4, 90
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            self._capability = 10 * major + minor
            units *= torch.cuda.get_device_properties(device).multi_processor_count
        self._programs = units
        # (requests x heads x shares) is below this for every batch: see _num_shares.
        most = units + max_requests * num_kv_heads
        self._part = torch.empty(most * self.group, head_size, device=device)
        self._peak = torch.empty(most * self.group, 2, device=device)
        self._logits = torch.empty(0, device=device)

    def decode(
        self,
        page: Page,
        batch: DecodeBatch,
        victims: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        first: torch.Tensor | None,
        scale: float,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        """One new token of each request. Synchronises nothing; allocates for a new pool alone."""
        self._check(page, out, query, key, value)
        num_requests, width = batch.table.shape
        if num_requests > self.max_requests:
            raise ValueError(f"a batch of {num_requests} where {self.max_requests} are prepared")
        scratch = page.num_blocks * page.num_kv_heads * self.group * page.block_size
        if self._logits.numel() != scratch:
            self._logits = torch.empty(scratch, device=self.device)
            self._compile(page, first is not None, scoring)
        shape = {"N": page.block_size, "D": self.head_size, "D_PAD": self.padded}
        strides = (batch.table.stride(0), *batch.orders.stride(), self.num_kv_heads)
        shares = self._num_shares(num_requests, width * page.block_size)
        rows, heads = batch.table, batch.orders
        decode.store_token[(num_requests, self.num_kv_heads)](
            key, value, key if first is None else first,
            page.key, page.value, page.score, page.position, rows, heads, victims,
            key.stride(0), value.stride(0), page.key.stride(0), page.score.stride(0), *strides,
            **shape, HAS_FIRST=first is not None,
        )  # fmt: skip
        group = {"G": self.group, "G_PAD": padded_group(self.group), "TILE": self._tile(page)}
        decode.attend_split[(num_requests, self.num_kv_heads, shares)](
            query, page.key, page.value, rows, heads, victims,
            self._logits, self._part, self._peak,
            scale, query.stride(0), page.key.stride(0), *strides, shares,
            **shape, **group, HAS_HOLE=scoring.by_page, KEEPS_LOGITS=scoring.power > 0,
            PRECISION=precision(page.key.dtype),
        )  # fmt: skip
        padded_block = triton.next_power_of_2(page.block_size)
        decode.reduce_and_score[(num_requests, self.num_kv_heads)](
            out, page.score, page.position, rows, heads, victims,
            self._logits, self._part, self._peak,
            out.stride(0), page.score.stride(0), *strides, shares, scoring.skip_recent,
            **shape, **group, N_PAD=padded_block, PAGES=max(1, 512 // padded_block),
            MOST_SHARES=MOST_SHARES,
            POWER=scoring.power, BY_PAGE=scoring.by_page, BY_AGE=scoring.by_age,
        )  # fmt: skip

    def prefill(
        self,
        page: Page,
        chunks: Sequence[PromptChunk],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        first: torch.Tensor | None,
        scale: float,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        """Chunks of prompts, all in one launch of each kernel."""
        self._check(page, out, query, key, value)
        sent = self._sent(chunks)
        longest = max(chunk.num_tokens for chunk in chunks)
        shape = {"N": page.block_size, "D": self.head_size, "D_PAD": self.padded}
        sizes = (len(sent), self.num_kv_heads)
        prompt.store_chunk[(*sizes, triton.cdiv(longest, 32))](
            key, value, key if first is None else first,
            page.key, page.value, page.score, page.position, sent.table, sent.orders,
            key.stride(0), value.stride(0), page.key.stride(0), page.score.stride(0),
            sent.table.stride(0), *sizes, **shape, TILE=32, HAS_FIRST=first is not None,
        )  # fmt: skip
        lse = self.prompt_attention(query, key, value, page, chunks, scale, out)
        if not scoring.power:
            return
        self._score(page, chunks, query, lse, scale, scoring, 0.0)

    def replay(
        self,
        page: Page,
        chunks: Sequence[PromptChunk],
        again: torch.Tensor,
        scale: float,
        scoring: Scoring,
    ) -> None:
        """All chunks in one launch of each kernel. Probabilities are not kept, but made twice."""
        self._check(page, again, again)
        lse = self._lse(page, chunks, again, scale, None)
        self._score(page, chunks, again, lse, scale, scoring, REPLAY_WEIGHT)

    def pack_survivors(
        self, pages: Sequence[Page], chunks: Sequence[PromptChunk], scoring: Scoring
    ) -> None:
        """Two launches for every layer, request and KV head."""
        page = pages[0]
        rows = [[getattr(chunk, name) for chunk in chunks] for name in pack.PACK_ORDERS]
        sent = Chunks.of(chunks, rows, self.device)
        views = ("key", "value", "score", "position")
        # An even number, so that every row begins where 16 bytes do, however many the layers.
        addresses = [
            [getattr(p, view).data_ptr() for p in pages] + [0] * (len(pages) % 2) for view in views
        ]
        host = torch.tensor(addresses, pin_memory=self.device.type == "cuda")
        keys, values, scores, positions = host.to(self.device, non_blocking=True)
        most = max(chunk.keep for chunk in chunks)
        grid = (self.num_kv_heads, len(sent), len(pages))
        survivors = torch.empty(*grid, most, dtype=torch.int32, device=self.device)
        table = (sent.table, sent.orders, survivors)
        sizes = (sent.table.stride(0), len(sent), self.num_kv_heads, most)
        pack.select_survivors[grid](
            scores, positions, *table, page.score.stride(0), *sizes,
            N=page.block_size, TILE=1024, BY_PAGE=scoring.by_page, BY_AGE=scoring.by_age,
            num_warps=8,
        )  # fmt: skip
        pack.pack_survivors[grid](
            keys, values, scores, positions, *table, page.key,
            page.key.stride(0), page.score.stride(0), *sizes,
            N=page.block_size, D=self.head_size, D_PAD=self.padded, TILE=32,
            ALIGNED=math.gcd(16, *addresses[0], *addresses[1]),
        )  # fmt: skip

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        page: Page,
        chunks: Sequence[PromptChunk],
        scale: float,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Our own flash attention; reads keys and values from the pages."""
        return self._lse(page, chunks, query, scale, out)

    def _lse(
        self,
        page: Page,
        chunks: Sequence[PromptChunk],
        query: torch.Tensor,
        scale: float,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """[Hq, T], of each query over the slots it sees; ``out`` None: all, as in a replay."""
        sent = self._sent(chunks)
        num_heads = self.num_kv_heads * self.group
        lse = torch.empty(num_heads, query.shape[0], device=self.device)
        answer = query if out is None else out
        longest = max(chunk.num_tokens for chunk in chunks)
        tiles, _ = self._prompt_tiles(page)
        prompt.attend[(triton.cdiv(longest, tiles["TILE_Q"]), num_heads, len(sent))](
            query, page.key, page.value, sent.table, sent.orders, answer, lse,
            scale, query.stride(0), answer.stride(0), lse.stride(0), page.key.stride(0),
            sent.table.stride(0), len(sent), self.num_kv_heads,
            **self._shape(page), **tiles, REPLAY=out is None,
        )  # fmt: skip
        return lse

    def _score(
        self,
        page: Page,
        chunks: Sequence[PromptChunk],
        query: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        scoring: Scoring,
        replay: float,
    ) -> None:
        """Add what queries give to scores; ``replay``: its weight, 0 where there is none."""
        sent = self._sent(chunks)
        _, tiles = self._prompt_tiles(page)
        slots = max(chunk.end for chunk in chunks)
        prompt.column_scores[(triton.cdiv(slots, tiles["TILE_K"]), self.num_kv_heads, len(sent))](
            query, page.key, page.score, page.position, sent.table, sent.orders, lse,
            scale, query.stride(0), lse.stride(0), page.key.stride(0), page.score.stride(0),
            sent.table.stride(0), len(sent), self.num_kv_heads, scoring.skip_recent,
            **self._shape(page), **tiles, POWER=scoring.power, REPLAY=replay,
            SKIPS=scoring.skip_recent > 0 and not replay,
        )  # fmt: skip

    def _shape(self, page: Page) -> dict[str, Any]:
        """Constants of the kernels that multiply a prompt's queries and keys."""
        return {
            "N": page.block_size,
            "D": self.head_size,
            "D_PAD": self.padded,
            "G": self.group,
            "PRECISION": precision(page.key.dtype),
        }

    def _prompt_tiles(self, page: Page) -> tuple[dict[str, int], dict[str, int]]:
        return prompt_tiles(self.padded, page.key.element_size(), self._capability)

    def _sent(self, chunks: Sequence[PromptChunk]) -> Chunks:
        """The step's chunks on the device, sent once for all layers."""
        if self._chunks is None or self._chunks.source is not chunks:
            rows = [
                [chunk.tokens.start for chunk in chunks],
                [chunk.num_tokens for chunk in chunks],
                [chunk.start for chunk in chunks],
                [chunk.position for chunk in chunks],
                [chunk.scores_from for chunk in chunks],
            ]
            self._chunks = Chunks.of(chunks, rows, self.device)
        return self._chunks

    def _num_shares(self, num_requests: int, num_slots: int) -> int:
        """Known from shapes alone, since a captured graph keeps it."""
        wanted = triton.cdiv(self._programs, num_requests * self.num_kv_heads)
        return max(1, min(wanted, MOST_SHARES, triton.cdiv(num_slots, TILE)))

    def _tile(self, page: Page) -> int:
        return tile_of(self.padded, page.key.element_size())

    def _compile(self, page: Page, has_first: bool, scoring: Scoring) -> None:
        """Run the prompt's kernels once on two pages of their own, before a request waits."""
        if self.device.type != "cuda":
            return
        content = 2 * self.head_size + 8 // page.key.element_size()
        shape = (2, self.num_kv_heads, page.block_size, content)
        cache = torch.zeros(shape, dtype=page.key.dtype, device=self.device)
        own = Page.of(cache, self.head_size)
        key = torch.zeros(2, self.num_kv_heads, self.head_size, dtype=cache.dtype).to(cache)
        query = key.repeat(1, self.group, 1)
        first = key[:, :, 0].float() if has_first else None
        table = torch.arange(2, dtype=torch.int32, device=self.device)
        chunks = [PromptChunk(slice(0, 2), table, 0, 0, 1, 1, 0, 0)]
        self.prefill(own, chunks, query, key, key, first, 1.0, scoring, torch.empty_like(query))
        if scoring.replays:
            self.replay(own, chunks, query, 1.0, scoring)
        self.pack_survivors([own], chunks, scoring)

    def _check(self, page: Page, out: torch.Tensor, *tensors: torch.Tensor) -> None:
        dtype, heads = page.key.dtype, (self.num_kv_heads, self.num_kv_heads * self.group)
        for tensor in (out, *tensors):
            good = (
                (tensor.dtype == dtype or tensor is out)
                and tensor.shape[1] in heads
                and tensor.shape[2] == self.head_size
                and tensor.stride()[1:] == (self.head_size, 1)
            )
            if not good:
                raise ValueError(
                    f"a tensor of {tensor.dtype}, shape {tuple(tensor.shape)} and strides "
                    f"{tensor.stride()} where pages hold {dtype} and heads of {self.head_size}"
                )


def padded_group(group: int) -> int:
    """Rows of a matrix product: none where there is one query head, else at least 16."""
    return 1 if group == 1 else max(16, triton.next_power_of_2(group))


def tile_of(padded_head: int, element_size: int) -> int:
    """Slots and queries of a tile, so that the widest heads fit the shared memory of any device."""
    return max(16, min(TILE, TILE * 256 // (padded_head * element_size)))


def prompt_tiles(
    padded_head: int, element_size: int, capability: int
) -> tuple[dict[str, int], dict[str, int]]:
    """How ``attend`` and ``column_scores`` are launched: what compiles without spilled registers.

    Args:
        padded_head: D_PAD.
        element_size: bytes.
        capability: of the device, 90 for 9.0.

    """
    tile, stages = tile_of(padded_head, element_size), STAGES[element_size]
    if capability < 80:
        tile = min(tile, 32)
        small = {"TILE_Q": tile, "TILE_K": tile, "num_warps": 8, "num_stages": stages}
        return small, small
    plain = {"TILE_Q": tile, "TILE_K": tile, "num_warps": 4, "num_stages": stages}
    return plain, plain | ({"TILE_K": 2 * tile, "num_warps": 8} if element_size == 2 else {})


def precision(dtype: torch.dtype) -> str:
    """Of matrix products: float32 is not rounded to fewer bits."""
    return "ieee" if dtype == torch.float32 else "tf32"
