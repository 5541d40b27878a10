# SPDX-License-Identifier: Apache-2.0
"""The stages on a GPU: buffers that outlive a step, and the launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton

from vllm_h2o.kernels.batch import DecodeBatch, PromptChunk, Scoring, StepTensors
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.programs import most_programs
from vllm_h2o.kernels.sinks import SinkLogits
from vllm_h2o.kernels.torch.rare import RareStages
from vllm_h2o.kernels.triton import decode, merge, prefill, score
from vllm_h2o.kernels.triton.chunks import DeviceChunks
from vllm_h2o.kernels.triton.moving import Moving
from vllm_h2o.kernels.triton.rehearsal import rehearse
from vllm_h2o.kernels.triton.sizes import (
    MAX_KV_SPLITS,
    PAGE_LANES,
    SPLIT_SLOTS,
    STORE_TILE,
    decode_tile,
    few_registers,
    kv_shape,
    merge_registers,
    num_spare,
    num_splits,
    padded_group,
    page_parts,
    precision,
    programs_per_processor,
    prompt_tiles,
)
from vllm_h2o.policy import Term

PROCESSORS = 1
"""Multiprocessors that stand for a device's where kernels are interpreted."""
MAX_SENT = 3
"""Lists of chunks that a step has at most: its prompts, and those of two terms."""
PromptAttention = Callable[[LayerCache, Sequence[PromptChunk], StepTensors], torch.Tensor]
"""(cache, chunks, tensors) -> lse [Hq, T] float32; writes ``tensors.out``."""


class TritonKernels(RareStages):
    """:class:`~vllm_h2o.kernels.interface.Kernels` for one layer's shape on one device.

    Args:
        device: of the tensors.
        max_requests: rows of a decode batch, padding included, at most.
        num_heads: query heads, Hq.
        num_kv_heads: KV heads, H.
        head_size: D.
        prompt_attention: attends prompts without attention sinks; the kernel of our own when None.
        terms: terms of the ranking that are added when prompts are stored: they are compiled ahead.
        shares_pages: whether survivors of prompts may have to leave pages that others read.

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
        terms: Sequence[Term] = (),
        shares_pages: bool = False,
    ) -> None:
        self.terms, self.shares_pages = terms, shares_pages
        self.device, self.max_requests = device, max_requests
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.group = num_heads // num_kv_heads
        self.padded_head = triton.next_power_of_2(head_size)
        self.prompt_attention = prompt_attention or self._attend
        self._packs = Moving(head_size, device)
        self._chunks: list[DeviceChunks] = []
        self._processors, self._shared_memory, self._capability = PROCESSORS, 228 << 10, 90
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            self._processors = found.multi_processor_count
            self._shared_memory = found.shared_memory_per_multiprocessor
            self._capability = 10 * found.major + found.minor
        # (programs of a KV head x KV heads) is below this for every batch: see _num_programs.
        max_splits = most_programs(self._processors, max_requests, num_kv_heads)
        self._partial_out = torch.empty(
            max_splits * self.group, head_size, device=device, dtype=torch.float32
        )
        self._partial_max_sum = torch.empty(
            max_splits * self.group, 2, device=device, dtype=torch.float32
        )
        self._nearest = torch.empty(max_splits, 2, device=device, dtype=torch.float32)
        self._candidates = (
            torch.empty(max_splits, device=device, dtype=torch.float32),
            torch.empty(max_splits, 2, dtype=torch.int32, device=device),
            torch.zeros(max_requests * num_kv_heads, dtype=torch.int32, device=device),
        )
        self._logits = torch.empty(0, device=device, dtype=torch.float32)

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
        num_kv_heads = self.num_kv_heads
        num_requests, max_pages = batch.block_table.shape
        self._prepare(cache, tensors, scoring, num_requests)
        shape = kv_shape(cache.block_size, self.head_size)
        can_split = {"CAN_SPLIT": cache.first_rows is not None}
        first_rows = victims if cache.first_rows is None else cache.first_rows
        request_args = (batch.block_table, batch.fields, victims, first_rows)
        num_slots, size = max_pages * cache.block_size, query.element_size()
        num_kv_splits, spare = self._num_programs(num_requests, num_slots, size)
        strides = (
            batch.block_table.stride(0), *batch.fields.stride(), num_kv_heads,
            cache.rows_per_block, cache.first_head, num_requests, num_kv_splits, spare,
        )  # fmt: skip
        page_stride, word_stride = cache.key.stride(0), cache.score.stride(0)
        tile = decode_tile(self.padded_head, size, self.group)
        grid = (num_kv_heads, spare + num_requests * num_kv_splits)
        splits = {"MAX_KV_SPLITS": MAX_KV_SPLITS, "SPLIT_SLOTS": SPLIT_SLOTS}
        masses, merges = self._masses(cache)
        if cache.mass is not None:
            merge.nearest_key[grid](
                cache.key, *request_args, self._nearest, page_stride, *strides,
                **shape, **can_split, **splits, TILE=tile,
            )  # fmt: skip
            merge.take_victim_in[num_kv_heads, num_requests](
                cache.key, cache.value, cache.score, cache.position, cache.mass, self._nearest,
                *request_args, scoring.merge, page_stride, word_stride, *strides,
                **shape, **can_split, **splits, TILE=tile,
                POWER=scoring.power, BY_AGE=scoring.by_age,
            )  # fmt: skip
        group = {"G": self.group, "G_PAD": padded_group(self.group), "TILE": tile}
        decode.attend_split[grid](
            query, key, value, cache.key, cache.value, cache.score, cache.position, masses,
            *request_args, self._logits, self._partial_out, self._partial_max_sum,
            tensors.scale * cache.scales[0], cache.scales[1],
            *(1.0 / scale for scale in cache.scales), query.stride(0), key.stride(0),
            value.stride(0), page_stride, word_stride, *strides,
            **shape, **group, **can_split, **merges, **splits,
            **few_registers(self.padded_head, size),
            KEEPS_LOGITS=scoring.power > 0, PRECISION=precision(query.dtype),
        )  # fmt: skip
        num_parts = num_kv_splits if spare else min(num_kv_splits, -(-num_slots // PAGE_LANES))
        sinks, has_sinks = self._sinks(tensors.sink_logits)
        score.merge_and_score[num_kv_heads, spare + num_requests * num_parts](
            out, cache.score, cache.position, *request_args, sinks,
            self._logits, self._partial_out, self._partial_max_sum, *self._candidates,
            out.stride(0), word_stride, *strides,
            **shape, **group, **page_parts(cache.block_size), **splits,
            **merge_registers(self.padded_head, size, self.group),
            POWER=scoring.power, BY_AGE=scoring.by_age, **can_split, **has_sinks,
        )  # fmt: skip

    def prefill(
        self,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        tensors: StepTensors,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Chunks of prompts, all in one launch of each kernel."""
        key, value = tensors.key, tensors.value
        self._check(cache, tensors)
        sent = self._sent(chunks)
        longest = max(chunk.num_tokens for chunk in chunks)
        sizes = (len(sent), cache.rows_per_block, cache.first_head)
        masses, merges = self._masses(cache)
        grid = (len(sent), self.num_kv_heads, triton.cdiv(longest, STORE_TILE))
        prefill.store_chunk[grid](
            key, value, cache.key, cache.value, cache.score, cache.position, masses,
            sent.block_table, sent.fields, *(1.0 / scale for scale in cache.scales),
            key.stride(0), value.stride(0), cache.key.stride(0), cache.score.stride(0),
            sent.block_table.stride(0), *sizes,
            **kv_shape(cache.block_size, self.head_size), **merges, TILE=STORE_TILE,
        )  # fmt: skip
        attend = self.prompt_attention if tensors.sink_logits is None else self._attend
        lse = attend(cache, chunks, tensors)
        if scoring.power and scoring.in_prompt:
            paid = Term("all", power=scoring.power)
            self._add_scores(cache, chunks, replace(tensors, lse=lse), paid, by_age=False)
        return lse

    def score_term(
        self,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        tensors: StepTensors,
        term: Term,
        by_age: bool,
    ) -> None:
        """All chunks in one launch of each kernel; of a window term attention has had the first."""
        self._check_heads(cache, tensors.query)
        if term.queries != "window" or tensors.lse is None:
            query = tensors.query
            if tensors.rotates(term):
                query = torch.empty(query.shape, dtype=query.dtype, device=self.device)
            lse = self._attend(cache, chunks, replace(tensors, out=query), term)
            tensors = replace(tensors, query=query, lse=lse)
        self._add_scores(cache, chunks, tensors, term, by_age)

    def pack_survivors(
        self, caches: Sequence[LayerCache], chunks: Sequence[PromptChunk], scoring: Scoring
    ) -> None:
        """Two launches for every layer, request and KV head; more where heads share slots."""
        self._packs(caches, chunks, scoring)

    def copy_survivors(
        self,
        caches: Sequence[LayerCache],
        chunk: PromptChunk,
        scoring: Scoring,
        scores: torch.Tensor,
    ) -> None:
        """The same launches, with another table to store by."""
        self._packs(caches, [chunk], scoring, scores)
        self._chunks.clear()  # or the scores, which are read now, would live as long as they do

    def _attend(
        self,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        tensors: StepTensors,
        term: Term | None = None,
    ) -> torch.Tensor:
        """Attend to the pages; with a term, find its queries' log-sum-exp, [Hq, T], alone.

        Then queries that are rotated are written to ``tensors.out``.
        """
        sent, query, out = self._sent(chunks), tensors.query, tensors.out
        rope = tensors.rotates(term)
        turns = rope.table if rope else self._partial_max_sum
        by_query, _ = self._prompt_options(cache, query)
        key_scale, value_scale = cache.scales
        sinks, has_sinks = self._sinks(tensors.sink_logits, query.shape[0] if term else None)
        of_each = sinks.stride(0) if sinks.dim() == 2 else 0
        lse = torch.empty(self.num_heads, query.shape[0], device=self.device, dtype=torch.float32)
        prefill.attend[self._query_grid(sent, by_query)](
            query, cache.key, cache.value, sent.block_table, sent.fields, sinks, turns, out, lse,
            tensors.scale * key_scale, value_scale,
            query.stride(0), out.stride(0), lse.stride(0), of_each, len(turns),
            cache.key.stride(0), sent.block_table.stride(0), len(sent), cache.rows_per_block,
            cache.first_head, **by_query, **has_sinks, **prefill.asked(term),
            **prefill.rotation(rope), ATTENDS=term is None,
        )  # fmt: skip
        return lse

    def _add_scores(
        self,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        tensors: StepTensors,
        term: Term,
        by_age: bool,
    ) -> None:
        """Add a term to the pages' scores, or store it in window scores."""
        sent, query, lse = self._sent(chunks), tensors.query, tensors.lse
        assert lse is not None
        without = cache.score_without_window
        keeps = bool(term.lifetime) and without is not None
        _, by_key = self._prompt_options(cache, query)
        apart = term.queries == "window" and any(c.window_scores is not None for c in chunks)
        prefill.column_scores[self._key_grid(sent, by_key, term.reach)](
            query, cache.key, cache.score, cache.position, without if keeps else cache.score,
            sent.block_table, sent.fields, lse, sent.windows, tensors.layer_index,
            tensors.scale * cache.scales[0], query.stride(0), lse.stride(0), cache.key.stride(0),
            cache.score.stride(0), sent.block_table.stride(0), len(sent), cache.rows_per_block,
            cache.first_head,
            **by_key, **prefill.asked(term), MAX=term.reduce == "max", POWER=term.power,
            REACH=term.reach, SKIP=term.skip, WEIGHT=term.weight, BY_AGE=by_age, APART=apart,
            KEEPS=keeps,
        )  # fmt: skip

    def _masses(self, cache: LayerCache) -> tuple[torch.Tensor, dict[str, bool]]:
        """Masses, or what stands in their place where there are none; and which it is."""
        if cache.mass is None:
            return cache.score, {"MERGES": False}
        return cache.mass, {"MERGES": True}

    def _sinks(
        self, sink_logits: SinkLogits, num_queries: int | None = None
    ) -> tuple[torch.Tensor, dict[str, bool]]:
        """Logits of attention sinks, or what stands in their place; and whether there are any.

        Args:
            sink_logits: [Hq], or [T, Hq].
            num_queries: T, where each query of a term may have its own.

        """
        if sink_logits is None:
            return self._partial_max_sum, {"HAS_SINKS": False}
        shapes = ((self.num_heads,), (num_queries, self.num_heads))
        if sink_logits.dtype != torch.float32 or sink_logits.shape not in shapes:
            found = f"{sink_logits.dtype} {tuple(sink_logits.shape)}"
            raise ValueError(f"sinks are {found} where there are {self.num_heads} query heads")
        return sink_logits, {"HAS_SINKS": True}

    def _prompt_options(
        self, cache: LayerCache, query: torch.Tensor
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Options of kernels that walk the keys of some queries, and the queries of some keys."""
        constants = kv_shape(cache.block_size, self.head_size) | {"G": self.group}
        exact, size = {"PRECISION": precision(query.dtype)}, query.element_size()
        by_query, by_key = prompt_tiles(self.padded_head, size, self._capability)
        return constants | exact | by_query, constants | exact | by_key

    def _query_grid(self, sent: DeviceChunks, options: dict[str, Any]) -> tuple[int, int, int]:
        """(query heads, chunks, tiles of queries): the last, which see most keys, begin first."""
        longest = max(chunk.num_tokens for chunk in sent.source)
        return self.num_heads, len(sent), triton.cdiv(longest, options["TILE_Q"])

    def _key_grid(
        self, sent: DeviceChunks, options: dict[str, Any], overlap: int = 0
    ) -> tuple[int, int, int]:
        """(KV heads, chunks, tiles of slots): the first, which most queries see, begin first.

        Each tile has some slots of the one before.
        """
        longest = max(chunk.attended_len for chunk in sent.source)
        tiles = triton.cdiv(longest, options["TILE_K"] - overlap)
        return self.num_kv_heads, len(sent), tiles

    def _sent(self, chunks: Sequence[PromptChunk]) -> DeviceChunks:
        """The step's chunks on the device, sent once for all layers."""
        for sent in self._chunks:
            if sent.source is chunks:
                return sent
        new = DeviceChunks.of(chunks, prefill.CHUNK_FIELDS, self.device)
        self._chunks = [new, *self._chunks[: MAX_SENT - 1]]
        return new

    def _num_programs(
        self, num_requests: int, num_slots: int, element_size: int
    ) -> tuple[int, int]:
        """Splits of every request, and spare programs of a KV head for further ones of long ones.

        Known from shapes alone, since a captured graph keeps them.
        """
        at_once = programs_per_processor(self.padded_head, element_size, self._shared_memory)
        at_once *= self._processors
        splits = num_splits(at_once, num_requests * self.num_kv_heads, num_slots)
        return splits, num_spare(at_once, self.num_kv_heads, splits, num_slots)

    def _prepare(
        self, cache: LayerCache, tensors: StepTensors, scoring: Scoring, num_requests: int
    ) -> None:
        """Check a batch; of a new pool make room for logits, and have prompts' kernels compiled."""
        self._check(cache, tensors)
        if num_requests > self.max_requests:
            raise ValueError(f"a batch of {num_requests} where {self.max_requests} are prepared")
        num_logits = cache.score.numel() * self.group
        if self._logits.numel() == num_logits:
            return
        self._logits = torch.empty(num_logits, device=self.device, dtype=torch.float32)
        if self.device.type == "cuda":
            rehearse(self, cache, tensors, scoring, self.terms, self.shares_pages)

    def _check(self, cache: LayerCache, tensors: StepTensors) -> None:
        for tensor in (tensors.query, tensors.key, tensors.value):
            self._check_heads(cache, tensor)
        self._check_heads(cache, tensors.out, any_dtype=True)

    def _check_heads(
        self, cache: LayerCache, tensor: torch.Tensor, any_dtype: bool = False
    ) -> None:
        is_valid = (
            (any_dtype or cache.is_quantised or tensor.dtype == cache.key.dtype)
            and tensor.shape[1] in (self.num_heads, self.num_kv_heads)
            and tensor.shape[2] == self.head_size
            and tensor.stride()[1:] == (self.head_size, 1)
        )
        if not is_valid:
            raise ValueError(
                f"a tensor of {tensor.dtype}, shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()} where pages hold {cache.key.dtype} and heads of "
                f"{self.head_size}"
            )
