"""The plan and the batch's rows, turned into the tensors that the kernels take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_h2o.engine import WORKER
from vllm_h2o.errors import IntegrityError
from vllm_h2o.kernels.batch import DecodeBatch, PromptChunk
from vllm_h2o.wire import RequestPlan
from vllm_h2o.worker.step import current_step

MAX_BATCH_ELEMENTS = 1 << 24
"""Elements of K that one decode call may gather: 64 MiB in float32."""


@dataclass
class HeavyHitterMetadata(AttentionMetadata):
    """One step, the same for every layer.

    Args:
        decodes: the requests with one token past their prompt, those of about one length together.
        prompts: the chunks of prompts, one by one.

    """

    decodes: list[DecodeBatch]
    prompts: list[PromptChunk]


class HeavyHitterMetadataBuilder(AttentionMetadataBuilder[HeavyHitterMetadata]):
    """Builds :class:`HeavyHitterMetadata` from the published step.

    In a warm-up it builds empty metadata, with which attention reads and writes nothing.
    """

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Another worker publishes no step: said at the start, not at the first request.
        worker = vllm_config.parallel_config.worker_cls
        if worker != WORKER:
            raise IntegrityError(f"the policy's backend runs in {worker}, not in {WORKER}")
        self.num_kv_heads = kv_cache_spec.num_kv_heads
        self.block_size = kv_cache_spec.block_size
        self.page_elements = self.num_kv_heads * self.block_size * kv_cache_spec.head_size

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> HeavyHitterMetadata:
        """The step's metadata, from its plan and the block table."""
        step = current_step()
        if step is None:
            return HeavyHitterMetadata([], [])
        plans = step.rows(common_attn_metadata)
        starts = common_attn_metadata.query_start_loc_cpu.tolist()
        table = common_attn_metadata.block_table_tensor
        decoding = [row for row, plan in enumerate(plans) if not plan.in_prompt]
        prompts = [
            self._prompt_chunk(plan, table[row], starts[row])
            for row, plan in enumerate(plans)
            if plan.in_prompt
        ]
        decodes = [
            self._decode_batch(plans, table, starts, rows)
            for rows in self._alike([(row, self._num_pages(plans[row])) for row in decoding])
        ]
        return HeavyHitterMetadata(decodes, prompts)

    def _prompt_chunk(self, plan: RequestPlan, table_row: torch.Tensor, start: int) -> PromptChunk:
        return PromptChunk(
            tokens=slice(start, start + plan.num_new),
            rows=self._page_rows(table_row[None, : self._num_pages(plan)])[0],
            start=plan.resident_start,
            position=plan.logical_start,
            keep=plan.keep_after,
            recent_from=plan.logical_end - plan.num_recent,
            num_sinks=plan.num_sinks,
            seed=plan.seed,
        )

    def _alike(self, rows: list[tuple[int, int]]) -> list[list[int]]:
        """Group rows, given with their pages, so that a batch is not padded to one long request.

        The longest of a group has less than twice the pages of the shortest, and the group's K has
        at most ``MAX_BATCH_ELEMENTS`` elements, unless one row alone has more.
        """
        groups: list[list[int]] = []
        room: dict[int, int] = {}
        open_group: dict[int, list[int]] = {}
        for row, num_pages in rows:
            size = num_pages.bit_length()
            widest = (1 << size) * self.page_elements
            if room.get(size, 0) < widest:
                open_group[size] = []
                groups.append(open_group[size])
                room[size] = max(MAX_BATCH_ELEMENTS, widest)
            open_group[size].append(row)
            room[size] -= widest
        return groups

    def _decode_batch(
        self,
        plans: list[RequestPlan],
        table: torch.Tensor,
        starts: list[int],
        decoding: list[int],
    ) -> DecodeBatch:
        chosen = [plans[row] for row in decoding]
        table = table[decoding, : max(self._num_pages(plan) for plan in chosen)]

        def column(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        return DecodeBatch(
            token=column([starts[row] for row in decoding]),
            rows=self._page_rows(table),
            attended=column([plan.attended for plan in chosen]),
            append_slot=column([plan.attended - 1 for plan in chosen]),
            overwrites=column([plan.overwrites for plan in chosen]).bool(),
            selects=column([plan.attended == plan.capacity for plan in chosen]).bool(),
            owner=table[:, 0].to(torch.int64),
            position=column([plan.logical_start for plan in chosen]),
            recent_from=column([plan.logical_end - plan.num_recent for plan in chosen]),
            num_sinks=column([plan.num_sinks for plan in chosen]),
            seed=column([plan.seed for plan in chosen]),
        )

    def _num_pages(self, plan: RequestPlan) -> int:
        return -(-plan.attended // self.block_size)

    def _page_rows(self, table: torch.Tensor) -> torch.Tensor:
        """[B, P] block ids -> [B, H, P] rows of the page views."""
        heads = torch.arange(self.num_kv_heads, dtype=torch.int64, device=table.device)
        return table.to(torch.int64)[:, None, :] * self.num_kv_heads + heads[:, None]
