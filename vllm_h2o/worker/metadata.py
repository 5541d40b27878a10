# SPDX-License-Identifier: Apache-2.0
"""The attention-metadata hook: the step's plan and its batch become what the kernels take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_h2o.errors import IntegrityError
from vllm_h2o.kernels.batch import DecodeBatch, PromptChunk, Scoring
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.pages import num_pages
from vllm_h2o.paths import WORKER
from vllm_h2o.policy import Ranking, Term
from vllm_h2o.wire import RequestPlan
from vllm_h2o.worker.after_step import Layers, Packing, Restoring
from vllm_h2o.worker.batching import Batching, CopiedBatches, PersistentBatch, Rows
from vllm_h2o.worker.drafts import Drafts
from vllm_h2o.worker.prompts import Chunks, own_blocks
from vllm_h2o.worker.reconstruction import Reconstruction, Rereading, blocks_of, sent
from vllm_h2o.worker.renumbering import Rolled, renumber
from vllm_h2o.worker.selector import select_kernels
from vllm_h2o.worker.step import Step, current_step

Chunked = Mapping[int, PromptChunk]
"""Chunks by row, of requests with more than one new token, or with survivors to pack."""


@dataclass
class HeavyHitterMetadata(AttentionMetadata):
    """One step, the same for every layer.

    Args:
        kernels: what computes it.
        scoring: what is added to scores, and how they are ranked.
        terms: terms that are added when the chunks of ``prompts`` are stored, in order.
        decodes: the requests with one new token; where K is copied, requests of about one length
            together.
        prompts: the chunks of prompts that have more.
        asked: for each term, what its queries see: chunks, or blocks of them.
        layer_index: each layer's place in the chunks' ``window_scores``, by its name.
        drafts: whose queries wait, or score now.
        zero_output: whether there are tokens of a warm-up that no padding of ``decodes`` makes
            zeros.
        reading: in the pass that reads prompts again, how its tokens attend and score; the pass
            has no decodes, and stores nothing.

    """

    kernels: Kernels
    scoring: Scoring
    terms: tuple[Term, ...]
    layer_index: Mapping[str, int]
    decodes: list[DecodeBatch] = field(default_factory=list)
    prompts: list[PromptChunk] = field(default_factory=list)
    asked: list[list[PromptChunk]] = field(default_factory=list)
    drafts: Drafts = field(default_factory=Drafts)
    zero_output: bool = False
    reading: Reconstruction | None = None


class HeavyHitterMetadataBuilder(AttentionMetadataBuilder[HeavyHitterMetadata]):
    """Builds :class:`HeavyHitterMetadata` from the published step.

    In a warm-up every row is padding, for which attention reads nothing and gives zeros. A captured
    graph runs kernels again, and not this: what they read stays in its buffers.
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
        config = KVPolicyConfig.required(vllm_config)
        self.spec, self.position_limit = kv_cache_spec, config.position_limit
        context = vllm_config.compilation_config.static_forward_context
        self.layers = Layers(layer_names, context)
        self.layer_index = {name: index for index, name in enumerate(layer_names)}
        self.ranking = self._computed(config.ranking)
        self.scoring = Scoring.of(self.ranking, config.schedule.by_page, config.merge_above)
        shape = (len(layer_names), kv_cache_spec.num_kv_heads)
        window = (config.num_window_queries, kv_cache_spec.block_size)
        ranks_chunks = self.ranking.scores_every_query
        self.chunks = Chunks(self.ranking.passes, *window, shape, ranks_chunks, device)
        self.use(select_kernels(vllm_config, kv_cache_spec, device, config))

    def _computed(self, ranking: Ranking) -> Ranking:
        """The ranking without its rotated term where nothing rotates queries; the log says so."""
        impls = [self.layers.context[name].impl for name in self.layers.names]
        if all(impl.rope is not None for impl in impls):
            return ranking
        return ranking.without("rotated")

    def use(self, kernels: Kernels) -> None:
        """Compute with these kernels, on batches as they want them."""
        spec = self.spec
        prefix_caching = bool(self.vllm_config.cache_config.enable_prefix_caching)
        self.kernels = kernels
        self.batching: Batching
        if kernels.copies_kv:
            page_elements = spec.num_kv_heads * spec.block_size * spec.head_size
            self.batching = CopiedBatches(spec.block_size, page_elements, prefix_caching)
        else:
            max_rows = self.vllm_config.scheduler_config.max_num_seqs
            self.batching = PersistentBatch(max_rows, spec.block_size, self.device, prefix_caching)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> HeavyHitterMetadata:
        """The step's metadata, from its plan and the block table; what follows it, to the step."""
        step, common = current_step(), common_attn_metadata
        if step:
            window = None if self.scoring.in_prompt else self.chunks.num_window_queries
            rows = step.rows(common, window)
            self._before(step, rows, common)
        else:
            starts = common.query_start_loc_cpu.tolist()
            rows = Rows((), (), common.block_table_tensor, starts, common.num_reqs)
        # One token that ends a prompt, or with which a request falls back, runs the decode kernel;
        # its request is packed like a prompt.
        chunked = {
            row: self.chunks.of(plan, rows.block_table[row], rows.starts[row])
            for row, plan in enumerate(rows.plans)
            if plan.num_new > 1 or plan.num_survivors
        }
        prompts = [chunk for chunk in chunked.values() if chunk.num_tokens > 1]
        covered = 0 if self.kernels.copies_kv else common.num_reqs
        metadata = self._metadata(
            decodes=self.batching(rows),
            prompts=prompts,
            asked=self.chunks.asked(prompts),
            zero_output=not rows.plans and common.num_actual_tokens > covered,
        )
        if step:
            self._add_drafts(step, rows, metadata.drafts)
            self._after(step, rows, chunked)
        return metadata

    def _metadata(self, **parts: object) -> HeavyHitterMetadata:
        own = (self.kernels, self.scoring, self.chunks.terms, self.layer_index)
        return HeavyHitterMetadata(*own, **parts)  # type: ignore[arg-type]

    def _before(self, step: Step, rows: Rows, common: CommonAttentionMetadata) -> None:
        """Before the forward pass: positions roll."""
        if self.position_limit is None:
            return
        for plan, table_row in zip(rows.plans, rows.block_table, strict=False):
            if plan.renumbers_from:
                blocks = table_row[: num_pages(plan.resident_start, self.spec.block_size)]
                renumber(plan, blocks, self.layers, self.kernels, self.scoring.power > 0)
        step.after.add("unroll", Rolled.of(rows.plans, common.positions, self.position_limit))

    def _add_drafts(self, step: Step, rows: Rows, drafts: Drafts) -> None:
        """Queries of drafts that this step computes, or that it scores."""
        waits = any(plan.num_unscored or plan.has_drafts for plan in rows.plans)
        if not self.scoring.power or not (waits or step.draft_queries):
            return
        each = zip(rows.request_ids, rows.plans, rows.block_table, rows.starts, strict=False)
        for request_id, plan, table_row, start in each:
            drafts.add(step.draft_queries, request_id, plan, table_row, start)

    def _after(self, step: Step, rows: Rows, chunked: Chunked) -> None:
        """Enter the work that follows the forward pass."""
        step.after.add("reread", self._rereading(step, rows, chunked))
        if packed := [chunk for chunk in chunked.values() if chunk.num_survivors]:
            step.after.add("pack", Packing(packed, self.layers, self.kernels, self.scoring))
        table = rows.block_table
        restored = [(plan, table[row]) for row, plan in enumerate(rows.plans) if plan.restored_end]
        if restored:
            step.after.add("restore", self._restoring(restored))

    def _rereading(self, step: Step, rows: Rows, chunked: Chunked) -> Rereading | None:
        """The pass that reads the step's prompts again."""
        term = self.ranking.term("reread")
        read = {row: chunk for row, chunk in chunked.items() if rows.plans[row].may_reread}
        if term is None or not read:
            return None
        each = [
            (rows.request_ids[row], chunk, self._ranked_end(rows.plans[row]))
            for row, chunk in read.items()
        ]
        blocks = list(blocks_of(each, term, self.spec.block_size))
        own = (self.kernels, term, self.scoring.by_age)
        reconstruction = Reconstruction(blocks, list(read.values()), *own)
        metadata = self._metadata(reading=reconstruction)
        return Rereading(reconstruction, metadata, self.layers.names, step.reader)

    def _ranked_end(self, plan: RequestPlan) -> int:
        """One past the last position when the tokens of a chunk are next ranked."""
        return plan.position_end if plan.packs_chunks else plan.prompt_end - plan.offset

    def _restoring(self, planned: list[tuple[RequestPlan, torch.Tensor]]) -> Restoring:
        own, ends = [], []
        for plan, row in planned:
            num_blocks = num_pages(plan.resident_end, self.spec.block_size)
            own.append(own_blocks(plan, row)[:num_blocks])
            ends += [plan.restored_end] * num_blocks
        on_device = sent(torch.tensor(ends), self.device)
        return Restoring(torch.cat(own), on_device, self.layers, self.kernels)
