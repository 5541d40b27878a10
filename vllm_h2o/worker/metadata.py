"""The plan and the batch's rows, turned into the tensors that the kernels take."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_h2o.errors import IntegrityError
from vllm_h2o.hooks import WORKER
from vllm_h2o.kernels.batch import DECODE_ORDERS, DecodeBatch, PromptChunk, Scoring
from vllm_h2o.kernels.cache import Page
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.kernels.torch.pack import pack_survivors
from vllm_h2o.kernels.torch.random import random_scores
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.policy import ScoreKind
from vllm_h2o.wire import RequestPlan
from vllm_h2o.worker.selector import choose_kernels
from vllm_h2o.worker.step import current_step

MAX_BATCH_ELEMENTS = 1 << 24
"""Elements of K that one decode call may gather: 64 MiB in float32."""


@dataclass
class HeavyHitterMetadata(AttentionMetadata):
    """One step, the same for every layer.

    Args:
        kernels: what computes it.
        scoring: what is added to scores, and what is ranked.
        decodes: the requests with one new token; where K is gathered, those of about one length
            together.
        prompts: the chunks of prompts that have more.
        watched: layer name -> scores ([H, end]) of each of ``prompts`` whose survivors leave the
            pages that they share, by its place there; filled in while the layers run.
        blank: whether there are tokens of a warm-up that no padding of ``decodes`` makes zeros.

    """

    kernels: Kernels
    scoring: Scoring
    decodes: list[DecodeBatch]
    prompts: list[PromptChunk]
    watched: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    blank: bool = False


class HeavyHitterMetadataBuilder(AttentionMetadataBuilder[HeavyHitterMetadata]):
    """Builds :class:`HeavyHitterMetadata` from the published step.

    In a warm-up every row is padding, for which attention reads nothing and gives zeros. A captured
    graph replays kernels, not this: the orders stay in one buffer, and the block table is vLLM's.
    """

    # A graph holds the decode kernels alone, which take any request with one new token.
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

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
        config = KVPolicyConfig.from_additional_config(vllm_config.additional_config)
        if config is None:
            raise IntegrityError("the policy's attention backend runs without a kv_policy")
        self.scoring = Scoring(
            power=config.score_power,
            skip_recent=config.score_skip_recent,
            by_page=config.granularity == "block",
            by_age=config.score_by_age,
            replays=config.score_replays,
        )
        self.draws = config.policy.score is ScoreKind.RANDOM
        self.kernels = choose_kernels(vllm_config, kv_cache_spec, device, config)
        self.num_kv_heads = kv_cache_spec.num_kv_heads
        self.heads = heads_of_rank(vllm_config, self.num_kv_heads)
        self.head_size = kv_cache_spec.head_size
        self.block_size = kv_cache_spec.block_size
        self.page_elements = self.num_kv_heads * self.block_size * self.head_size
        rows = vllm_config.scheduler_config.max_num_seqs
        # Where requests share pages, one's own may begin anywhere in its row of the block table.
        self.shares = bool(vllm_config.cache_config.enable_prefix_caching)
        self._own_pages = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self._orders = torch.zeros(rows, len(DECODE_ORDERS), dtype=torch.int64, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> HeavyHitterMetadata:
        """The step's metadata, from its plan and the block table."""
        step = current_step()
        plans = step.rows(common_attn_metadata) if step else []
        starts = common_attn_metadata.query_start_loc_cpu.tolist()
        table = common_attn_metadata.block_table_tensor
        # A last token by itself is attended to as a decode, and packed as a chunk.
        chunks = [
            self._prompt_chunk(plan, table[row], starts[row])
            for row, plan in enumerate(plans)
            if plan.num_new > 1 or plan.keep_after
        ]
        prompts = [chunk for chunk in chunks if chunk.num_tokens > 1]
        decoding = [row for row, plan in enumerate(plans) if plan.num_new == 1]
        if self.kernels.gathers:
            lengths = [(row, self._num_pages(plans[row].attended)) for row in decoding]
            groups = self._alike(lengths)
            decodes = [self._gathered(plans, table, starts, rows) for rows in groups]
        else:
            num_rows = common_attn_metadata.num_reqs if not prompts else len(decoding)
            decodes = self._in_place(plans, table, starts, decoding, num_rows)
        covered = 0 if self.kernels.gathers else common_attn_metadata.num_reqs
        blank = not plans and common_attn_metadata.num_actual_tokens > covered
        metadata = HeavyHitterMetadata(self.kernels, self.scoring, decodes, prompts, blank=blank)
        if step and any(chunk.keep for chunk in chunks):
            # When the forward pass is through, a replayed graph or not.
            step.afterwards.append(partial(self._pack, chunks, metadata.watched))
        return metadata

    def _prompt_chunk(self, plan: RequestPlan, table_row: torch.Tensor, start: int) -> PromptChunk:
        scores_from = min(max(plan.scores_from - plan.logical_start, 0), plan.num_new)
        into = None
        if plan.pack_page:
            into = table_row[plan.pack_page : plan.pack_page + self._num_pages(plan.held_end)]
        return PromptChunk(
            tokens=slice(start, start + plan.num_new),
            table=table_row,
            start=plan.resident_start,
            position=plan.logical_start,
            keep=plan.keep_after,
            recent_from=plan.logical_end - plan.num_recent,
            num_sinks=plan.num_sinks,
            seed=plan.seed,
            scores_from=plan.num_new if plan.pack_page else scores_from,
            watch_from=scores_from,
            into=into,
        )

    def _pack(self, chunks: list[PromptChunk], watched: dict[str, dict[int, torch.Tensor]]) -> None:
        layers = self.vllm_config.compilation_config.static_forward_context
        pages = [Page.of(layers[name].kv_cache, self.head_size) for name in self.layer_names]
        here = [chunk for chunk in chunks if chunk.keep and chunk.into is None]
        if here:
            self.kernels.pack_survivors(pages, here, self.scoring)
        for chunk in chunks:
            if chunk.into is None:
                continue
            for name, page in zip(self.layer_names, pages, strict=True):
                score = watched.get(name, {}).get(chunk.tokens.start)
                if self.draws:
                    score = drawn_by_position(name, chunk, self.heads, self.device).T
                pack_survivors(page, chunk, self.scoring, score)

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

    def _gathered(
        self, plans: list[RequestPlan], table: torch.Tensor, starts: list[int], rows: list[int]
    ) -> DecodeBatch:
        width = max(self._num_pages(plans[row].attended) for row in rows)
        orders = torch.tensor([_orders(plans[row], starts[row]) for row in rows])
        table = table[rows]
        if self.shares:
            table = self._from_own_pages(table, [plans[row] for row in rows])
        return DecodeBatch(table[:, :width], orders.to(self.device).T)

    def _from_own_pages(self, table: torch.Tensor, plans: list[RequestPlan]) -> torch.Tensor:
        """The rows of a block table, each from its request's first page on; padding as it is."""
        first = torch.zeros(len(table), 1, dtype=torch.int64, pin_memory=self._pins)
        first[: len(plans), 0] = torch.tensor([plan.first_page for plan in plans])
        last = table.shape[1] - 1
        column = torch.arange(last + 1, device=self.device)
        column = (first.to(self.device, non_blocking=True) + column).clamp_(max=last)
        return table.gather(1, column)

    def _in_place(
        self,
        plans: list[RequestPlan],
        table: torch.Tensor,
        starts: list[int],
        rows: list[int],
        num_rows: int,
    ) -> list[DecodeBatch]:
        """One batch of ``num_rows``, the last of them padding, in the buffer that graphs read."""
        if num_rows == 0:
            return []
        written = [_orders(plans[row], starts[row]) for row in rows]
        padding = [0] * (len(DECODE_ORDERS) - 1)
        written += [(token, *padding) for token in range(len(rows), num_rows)]
        # Fresh memory each step: the copy of an earlier one may still be waiting for the device.
        host = torch.tensor(written, pin_memory=self._pins)
        orders = self._orders[:num_rows]
        orders.copy_(host, non_blocking=True)
        if len(rows) < len(plans):
            chosen = torch.tensor(rows, pin_memory=self._pins)
            table = table[chosen.to(self.device, non_blocking=True)]
        table = table[:num_rows]
        if self.shares:
            table = self._kept_in_place(self._from_own_pages(table, [plans[row] for row in rows]))
        return [DecodeBatch(table, orders.T)]

    def _kept_in_place(self, table: torch.Tensor) -> torch.Tensor:
        """A copy of ``table`` in the buffer that graphs read."""
        if self._own_pages.shape[1] != table.shape[1]:
            shape = (len(self._orders), table.shape[1])
            self._own_pages = torch.zeros(shape, dtype=table.dtype, device=self.device)
        return self._own_pages[: len(table)].copy_(table)

    @property
    def _pins(self) -> bool:
        return self.device.type == "cuda"

    def _num_pages(self, num_slots: int) -> int:
        return -(-num_slots // self.block_size)


def heads_of_rank(vllm_config: VllmConfig, num_kv_heads: int) -> range:
    """Which of the whole model's KV heads this tensor-parallel rank has, ``num_kv_heads`` of them.

    Where there are more ranks than heads, neighbours have the same one.
    """
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    if num_ranks == 1:
        return range(num_kv_heads)
    total = vllm_config.model_config.get_total_num_kv_heads()
    first = get_tensor_model_parallel_rank() * total // num_ranks
    return range(first, first + num_kv_heads)


def drawn_by_position(
    layer_name: str, chunk: PromptChunk, heads: range, device: torch.device
) -> torch.Tensor:
    """[end, H], float32: what tokens of the ``random`` policy are stored with, to a chunk's end."""
    position = torch.arange(chunk.position_end, device=device)
    seed = torch.full_like(position, chunk.seed)
    return random_scores(seed, extract_layer_index(layer_name), heads, position)


def _orders(plan: RequestPlan, token: int) -> tuple[int, ...]:
    """In the order of ``DECODE_ORDERS``."""
    return (
        token,
        plan.attended,
        plan.overwrites,
        plan.selects,
        plan.logical_start,
        plan.logical_end - plan.num_recent,
        plan.num_sinks,
        plan.seed,
        plan.refill,
        plan.hole,
        plan.logical_start >= plan.scores_from,
    )
