"""The four names on a GPU: buffers that outlive a step, and the launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from vllm_h2o.kernels.batch import (
    SECOND_PASS_WEIGHT,
    DecodeBatch,
    PromptChunk,
    Scoring,
    StepTensors,
)
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.triton import decode, pack
from vllm_h2o.kernels.triton import prefill as prompt

TILE = 64
"""Slots that a decode program holds at once."""
STAGES = {2: 3, 4: 1}
"""Loads in flight of a prompt's kernels, by bytes of an element."""
MAX_KV_SPLITS = 32
"""Programs that one (request, KV head) is divided among at most."""

PromptAttention = Callable[[LayerCache, Sequence[PromptChunk], StepTensors], torch.Tensor]
"""(cache, chunks, tensors) -> lse [Hq, T] float32; writes ``tensors.out``."""


@dataclass(frozen=True)
class Chunks:
    """Chunks of prompts on the device.

    Args:
        source: what they were made of.
        table: [R, P], int32.
        fields: [len(prompt.CHUNK_FIELDS) or len(pack.PACK_FIELDS), R], int32.

    """

    source: Sequence[PromptChunk]
    table: torch.Tensor
    fields: torch.Tensor

    @classmethod
    def of(
        cls, source: Sequence[PromptChunk], rows: list[list[int]], device: torch.device
    ) -> Chunks:
        """Send the fields, given as rows of integers. No synchronisation."""
        host = torch.tensor(rows, dtype=torch.int32, pin_memory=device.type == "cuda")
        table = torch.stack([chunk.block_table for chunk in source])
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

    copies_kv = False

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
        # (requests x heads x shares) is below this for every batch: see _num_kv_splits.
        most = units + max_requests * num_kv_heads
        self._part = torch.empty(most * self.group, head_size, device=device)
        self._peak = torch.empty(most * self.group, 2, device=device)
        self._logits = torch.empty(0, device=device)

    def decode(
        self,
        cache: LayerCache,
        batch: DecodeBatch,
        victims: torch.Tensor,
        tensors: StepTensors,
        scoring: Scoring,
    ) -> None:
        """One new token of each request. Synchronises nothing; allocates for a new pool alone."""
        query, key, value, out = tensors.query, tensors.key, tensors.value, tensors.out
        initial, scale = tensors.initial_score, tensors.scale
        self._check(cache, out, query, key, value)
        num_requests, width = batch.block_table.shape
        if num_requests > self.max_requests:
            raise ValueError(f"a batch of {num_requests} where {self.max_requests} are prepared")
        scratch = cache.num_blocks * cache.num_kv_heads * self.group * cache.block_size
        if self._logits.numel() != scratch:
            self._logits = torch.empty(scratch, device=self.device)
            self._compile(cache, initial is not None, scoring)
        shape = {"N": cache.block_size, "D": self.head_size, "D_PAD": self.padded}
        strides = (batch.block_table.stride(0), *batch.fields.stride(), self.num_kv_heads)
        shares = self._num_kv_splits(num_requests, width * cache.block_size)
        rows, heads = batch.block_table, batch.fields
        decode.store_token[(num_requests, self.num_kv_heads)](
            key, value, key if initial is None else initial,
            cache.key, cache.value, cache.score, cache.position, rows, heads, victims,
            key.stride(0), value.stride(0), cache.key.stride(0), cache.score.stride(0), *strides,
            **shape, HAS_INITIAL_SCORE=initial is not None,
        )  # fmt: skip
        group = {"G": self.group, "G_PAD": padded_group(self.group), "TILE": self._tile(cache)}
        decode.attend_split[(num_requests, self.num_kv_heads, shares)](
            query, cache.key, cache.value, rows, heads, victims,
            self._logits, self._part, self._peak,
            scale, query.stride(0), cache.key.stride(0), *strides, shares,
            **shape, **group, HAS_FREE_SLOTS=scoring.by_page, KEEPS_LOGITS=scoring.power > 0,
            PRECISION=precision(cache.key.dtype),
        )  # fmt: skip
        padded_block = triton.next_power_of_2(cache.block_size)
        decode.reduce_and_score[(num_requests, self.num_kv_heads)](
            out, cache.score, cache.position, rows, heads, victims,
            self._logits, self._part, self._peak,
            out.stride(0), cache.score.stride(0), *strides, shares, scoring.skip_recent,
            **shape, **group, N_PAD=padded_block, PAGES=max(1, 512 // padded_block),
            MAX_KV_SPLITS=MAX_KV_SPLITS,
            POWER=scoring.power, BY_PAGE=scoring.by_page, BY_AGE=scoring.by_age,
        )  # fmt: skip

    def prefill(
        self,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        tensors: StepTensors,
        scoring: Scoring,
    ) -> None:
        """Chunks of prompts, all in one launch of each kernel."""
        query, key, value, out = tensors.query, tensors.key, tensors.value, tensors.out
        initial, scale = tensors.initial_score, tensors.scale
        self._check(cache, out, query, key, value)
        sent = self._sent(chunks)
        longest = max(chunk.num_tokens for chunk in chunks)
        shape = {"N": cache.block_size, "D": self.head_size, "D_PAD": self.padded}
        sizes = (len(sent), self.num_kv_heads)
        prompt.store_chunk[(*sizes, triton.cdiv(longest, 32))](
            key, value, key if initial is None else initial,
            cache.key, cache.value, cache.score, cache.position, sent.table, sent.fields,
            key.stride(0), value.stride(0), cache.key.stride(0), cache.score.stride(0),
            sent.table.stride(0), *sizes, **shape, TILE=32, HAS_INITIAL_SCORE=initial is not None,
        )  # fmt: skip
        lse = self.prompt_attention(cache, chunks, tensors)
        if not scoring.power:
            return
        self._score(cache, chunks, query, lse, scale, scoring, 0.0)

    def score_second_pass(
        self,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        rotated_query: torch.Tensor,
        scale: float,
        scoring: Scoring,
    ) -> None:
        """All chunks in one launch of each kernel. Probabilities are not kept, but made twice."""
        self._check(cache, rotated_query, rotated_query)
        lse = self._lse(cache, chunks, rotated_query, scale, None)
        self._score(cache, chunks, rotated_query, lse, scale, scoring, SECOND_PASS_WEIGHT)

    def pack_survivors(
        self, caches: Sequence[LayerCache], chunks: Sequence[PromptChunk], scoring: Scoring
    ) -> None:
        """Two launches for every layer, request and KV head."""
        cache = caches[0]
        rows = [[getattr(chunk, name) for chunk in chunks] for name in pack.PACK_FIELDS]
        sent = Chunks.of(chunks, rows, self.device)
        views = ("key", "value", "score", "position")
        # An even number, so that every row begins where 16 bytes do, however many the layers.
        addresses = [
            [getattr(p, view).data_ptr() for p in caches] + [0] * (len(caches) % 2)
            for view in views
        ]
        host = torch.tensor(addresses, pin_memory=self.device.type == "cuda")
        keys, values, scores, positions = host.to(self.device, non_blocking=True)
        most = max(chunk.num_survivors for chunk in chunks)
        grid = (self.num_kv_heads, len(sent), len(caches))
        survivors = torch.empty(*grid, most, dtype=torch.int32, device=self.device)
        table = (sent.table, sent.fields, survivors)
        sizes = (sent.table.stride(0), len(sent), self.num_kv_heads, most)
        pack.select_survivors[grid](
            scores, positions, *table, cache.score.stride(0), *sizes,
            N=cache.block_size, TILE=1024, BY_PAGE=scoring.by_page, BY_AGE=scoring.by_age,
            num_warps=8,
        )  # fmt: skip
        pack.pack_survivors[grid](
            keys, values, scores, positions, *table, cache.key,
            cache.key.stride(0), cache.score.stride(0), *sizes,
            N=cache.block_size, D=self.head_size, D_PAD=self.padded, TILE=32,
            ALIGNED=math.gcd(16, *addresses[0], *addresses[1]),
        )  # fmt: skip

    def _attend(
        self,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        tensors: StepTensors,
    ) -> torch.Tensor:
        """Our own flash attention; reads keys and values from the pages."""
        return self._lse(cache, chunks, tensors.query, tensors.scale, tensors.out)

    def _lse(
        self,
        cache: LayerCache,
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
        tiles, _ = self._prompt_tiles(cache)
        prompt.attend[(triton.cdiv(longest, tiles["TILE_Q"]), num_heads, len(sent))](
            query, cache.key, cache.value, sent.table, sent.fields, answer, lse,
            scale, query.stride(0), answer.stride(0), lse.stride(0), cache.key.stride(0),
            sent.table.stride(0), len(sent), self.num_kv_heads,
            **self._shape(cache), **tiles, REPLAY=out is None,
        )  # fmt: skip
        return lse

    def _score(
        self,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        query: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        scoring: Scoring,
        replay: float,
    ) -> None:
        """Add what queries give to scores; ``replay``: its weight, 0 where there is none."""
        sent = self._sent(chunks)
        _, tiles = self._prompt_tiles(cache)
        slots = max(chunk.attended_len for chunk in chunks)
        prompt.column_scores[(triton.cdiv(slots, tiles["TILE_K"]), self.num_kv_heads, len(sent))](
            query, cache.key, cache.score, cache.position, sent.table, sent.fields, lse,
            scale, query.stride(0), lse.stride(0), cache.key.stride(0), cache.score.stride(0),
            sent.table.stride(0), len(sent), self.num_kv_heads, scoring.skip_recent,
            **self._shape(cache), **tiles, POWER=scoring.power, REPLAY=replay,
            SKIPS=scoring.skip_recent > 0 and not replay,
        )  # fmt: skip

    def _shape(self, cache: LayerCache) -> dict[str, Any]:
        """Constants of the kernels that multiply a prompt's queries and keys."""
        return {
            "N": cache.block_size,
            "D": self.head_size,
            "D_PAD": self.padded,
            "G": self.group,
            "PRECISION": precision(cache.key.dtype),
        }

    def _prompt_tiles(self, cache: LayerCache) -> tuple[dict[str, int], dict[str, int]]:
        return prompt_tiles(self.padded, cache.key.element_size(), self._capability)

    def _sent(self, chunks: Sequence[PromptChunk]) -> Chunks:
        """The step's chunks on the device, sent once for all layers."""
        if self._chunks is None or self._chunks.source is not chunks:
            rows = [
                [chunk.tokens.start for chunk in chunks],
                [chunk.num_tokens for chunk in chunks],
                [chunk.resident_start for chunk in chunks],
                [chunk.logical_start for chunk in chunks],
                [chunk.first_scoring_query for chunk in chunks],
            ]
            self._chunks = Chunks.of(chunks, rows, self.device)
        return self._chunks

    def _num_kv_splits(self, num_requests: int, num_slots: int) -> int:
        """Known from shapes alone, since a captured graph keeps it."""
        wanted = triton.cdiv(self._programs, num_requests * self.num_kv_heads)
        return max(1, min(wanted, MAX_KV_SPLITS, triton.cdiv(num_slots, TILE)))

    def _tile(self, cache: LayerCache) -> int:
        return tile_of(self.padded, cache.key.element_size())

    def _compile(self, cache: LayerCache, has_initial_score: bool, scoring: Scoring) -> None:
        """Run the prompt's kernels once on two pages of their own, before a request waits."""
        if self.device.type != "cuda":
            return
        content = 2 * self.head_size + 8 // cache.key.element_size()
        shape = (2, self.num_kv_heads, cache.block_size, content)
        own_cache = torch.zeros(shape, dtype=cache.key.dtype, device=self.device)
        own = LayerCache.of(own_cache, self.head_size)
        key = torch.zeros(2, self.num_kv_heads, self.head_size, dtype=own_cache.dtype).to(own_cache)
        query = key.repeat(1, self.group, 1)
        initial = key[:, :, 0].float() if has_initial_score else None
        table = torch.arange(2, dtype=torch.int32, device=self.device)
        chunks = [
            PromptChunk(
                tokens=slice(0, 2),
                block_table=table,
                resident_start=0,
                logical_start=0,
                num_survivors=1,
                recent_start=1,
            )
        ]
        tensors = StepTensors(query, key, key, torch.empty_like(query), initial, 1.0)
        self.prefill(own, chunks, tensors, scoring)
        if scoring.second_pass:
            self.score_second_pass(own, chunks, query, 1.0, scoring)
        self.pack_survivors([own], chunks, scoring)

    def _check(self, cache: LayerCache, out: torch.Tensor, *tensors: torch.Tensor) -> None:
        dtype, heads = cache.key.dtype, (self.num_kv_heads, self.num_kv_heads * self.group)
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
