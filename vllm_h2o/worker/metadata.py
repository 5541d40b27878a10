"""The plan and the batch's rows become the tensors that the kernels take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from vllm_h2o.kernels.batch import (
    LARGEST_SECOND_PASS,
    MEAN_SECOND_PASS,
    RECONSTRUCTION_PASS,
    WINDOW_PASS,
    WINDOW_REACH,
    DecodeBatch,
    PromptChunk,
    Scoring,
    ScoringPass,
)
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.pages import num_pages
from vllm_h2o.paths import WORKER
from vllm_h2o.policy import SecondPass
from vllm_h2o.wire import RequestPlan
from vllm_h2o.worker.batching import Batching, CopiedBatches, PersistentBatch, Rows
from vllm_h2o.worker.packing import Packing, Restoring
from vllm_h2o.worker.random import RandomScores
from vllm_h2o.worker.reconstruction import Reconstruction, blocks_of
from vllm_h2o.worker.renumbering import Renumbering, Rolled
from vllm_h2o.worker.selector import select_kernels
from vllm_h2o.worker.step import DraftQueries, Step, current_step


@dataclass
class HeavyHitterMetadata(AttentionMetadata):
    """One step, the same for every layer.

    Args:
        kernels: what computes it.
        scoring: what is added to scores, and what is ranked.
        decodes: the requests with one new token; where K is copied, those of about one length
            together.
        prompts: the chunks of prompts that have more.
        asked: for each scoring pass, what its queries see: the chunks that have any, or blocks; of
            one that reads again, nothing yet.
        drafted: rows of the step's tensors that are drafts and the token before them, and where
            each layer puts their queries, [T, Hq, D].
        accepted: tokens of last steps with drafts that were accepted, and the queries of those
            steps, by layer: they score first.
        layer_index: each layer's place in the chunks' ``window_scores``, by its name.
        zero_output: whether there are tokens of a warm-up that no padding of ``decodes`` makes
            zeros.

    """

    kernels: Kernels
    scoring: Scoring
    decodes: list[DecodeBatch]
    prompts: list[PromptChunk]
    asked: list[list[PromptChunk]]
    layer_index: Mapping[str, int]
    drafted: list[tuple[slice, dict[str, torch.Tensor]]] = field(default_factory=list)
    accepted: list[tuple[PromptChunk, dict[str, torch.Tensor]]] = field(default_factory=list)
    zero_output: bool = False


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
        self.layers = vllm_config.compilation_config.static_forward_context
        self.spec = kv_cache_spec
        self.scoring = Scoring(
            power=config.score_power,
            skip_recent=config.score_skip_recent,
            by_page=config.granularity == "block",
            by_age=config.ranking.by_age,
            passes=tuple(self._passes(config, layer_names)),
            by_maximum=config.scores_by_maximum,
            reach=WINDOW_REACH if config.scores_by_maximum else 0,
            merge=config.merge,
        )
        self.random_scores = RandomScores.of(vllm_config, kv_cache_spec.num_kv_heads)
        self.position_limit = config.position_limit
        self.layer_index = {name: index for index, name in enumerate(layer_names)}
        self.use(select_kernels(vllm_config, kv_cache_spec, device, config))

    def _passes(self, config: KVPolicyConfig, layer_names: list[str]) -> Iterator[ScoringPass]:
        """The scoring passes of a prompt; a second pass only where queries can be rotated."""
        if config.ranking.second_pass is SecondPass.MEAN:
            yield MEAN_SECOND_PASS
        if config.ranking.second_pass is SecondPass.LARGEST and all(
            self.layers[name].impl.rotate is not None for name in layer_names
        ):
            yield LARGEST_SECOND_PASS.in_pages(self.spec.block_size)
        if config.ranking.reads_again:
            yield RECONSTRUCTION_PASS.in_pages(self.spec.block_size)
        if config.ranking.window:
            yield WINDOW_PASS

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
        """The step's metadata, from its plan and the block table; what is to pack, to the step."""
        step = current_step()
        plans = step.rows(common_attn_metadata) if step else []
        num_rows, table = common_attn_metadata.num_reqs, common_attn_metadata.block_table_tensor
        starts = common_attn_metadata.query_start_loc_cpu.tolist()
        if step and self.position_limit is not None:
            self._roll(step, plans, common_attn_metadata, self.position_limit)
        # One token that ends a prompt, or with which a request falls back, runs the decode kernel;
        # its request is still packed.
        planned = [
            (plan, self._prompt_chunk(plan, table[row], starts[row]))
            for row, plan in enumerate(plans)
            if plan.num_new > 1 or plan.num_survivors
        ]
        chunks = [chunk for _, chunk in planned]
        prompts = [chunk for chunk in chunks if chunk.num_tokens > 1]
        decoding = [row for row, plan in enumerate(plans) if plan.num_new == 1]
        num_padded = num_rows if not prompts else len(decoding)
        decodes = self.batching(Rows(plans, table, starts, decoding, num_padded))
        if step:
            self._read_again(step, common_attn_metadata, prompts)
        # What an observation window gives reaches further once: not whenever tokens are evicted.
        for reach in {self.scoring.reach, 0}:
            packed = [c for p, c in planned if p.num_survivors and self._reach(p) == reach]
            if step and packed:
                step.packings.append(self._packing(packed, reach))
        restored = [(plan, table[row]) for row, plan in enumerate(plans) if plan.restored_end]
        if step and restored:
            step.packings.append(self._restoring(restored))
        covered = 0 if self.kernels.copies_kv else num_rows
        metadata = HeavyHitterMetadata(
            self.kernels,
            self.scoring,
            decodes,
            prompts,
            [
                [
                    block
                    for chunk in prompts
                    if not which.reads_again
                    for block in chunk.in_blocks(which)
                ]
                for which in self.scoring.passes
            ],
            self.layer_index,
            zero_output=not plans and common_attn_metadata.num_actual_tokens > covered,
        )
        if (step and self.scoring.power) and (
            step.draft_queries or any(plan.num_unscored or plan.has_drafts for plan in plans)
        ):
            order = step.order(common_attn_metadata)
            for row, (request_id, plan) in enumerate(zip(order, plans, strict=True)):
                self._draft(metadata, step.draft_queries, request_id, plan, table[row], starts[row])
        return metadata

    def _read_again(
        self, step: Step, common: CommonAttentionMetadata, prompts: list[PromptChunk]
    ) -> None:
        """Before survivors are packed: what the step's prompts are read again for."""
        for which in self.scoring.passes:
            if not which.reads_again or not prompts:
                continue
            starts = common.query_start_loc_cpu.tolist()
            request_at = dict(zip(starts, step.order(common), strict=False))
            each = [(request_at[chunk.tokens.start], chunk) for chunk in prompts]
            blocks = list(blocks_of(each, which))
            if any(isinstance(packing, Reconstruction) for packing in step.packings):
                raise IntegrityError("prompts of a step are read again twice")
            if blocks:
                limit = self.vllm_config.model_config.max_model_len
                own = (self.kernels, which, self.layer_names, limit, step.reader)
                step.packings.append(Reconstruction(blocks, prompts, *own))

    def _draft(
        self,
        metadata: HeavyHitterMetadata,
        kept: DraftQueries,
        request_id: str,
        plan: RequestPlan,
        table_row: torch.Tensor,
        start: int,
    ) -> None:
        """Say what is to be done with queries of drafts: an earlier step's, and this one's.

        Raises:
            IntegrityError: when queries that score now were not kept.

        """
        queries, num = kept.pop(request_id, None), plan.num_unscored
        if num and not plan.fits:
            if queries is None:
                raise IntegrityError(f"request {request_id}: the queries of its drafts are gone")
            chunk = PromptChunk(
                tokens=slice(0, num),
                block_table=_own_blocks(plan, table_row),
                resident_start=plan.resident_start - num,
                logical_start=plan.logical_start - num,
            )
            metadata.accepted.append((chunk, queries))
        if plan.has_drafts and not plan.fits:
            tokens = slice(start, start + plan.num_new)
            metadata.drafted.append((tokens, kept.setdefault(request_id, {})))

    def _prompt_chunk(self, plan: RequestPlan, table_row: torch.Tensor, start: int) -> PromptChunk:
        # Drafts score when it is known which of them were accepted.
        waits = plan.fits or plan.has_drafts
        first_scoring, first_window = (
            plan.num_new if waits else min(max(first - plan.logical_start, 0), plan.num_new)
            for first in (plan.scoring_start, plan.window_start)
        )
        destination = window_scores = None
        if plan.pack_block_idx:
            num_blocks = num_pages(plan.held_end, self.spec.block_size)
            destination = table_row[plan.pack_block_idx : plan.pack_block_idx + num_blocks]
            if self.scoring.power and plan.num_new > 1:
                shape = (len(self.layer_index), self.spec.num_kv_heads, plan.attended_len)
                window_scores = torch.empty(shape, dtype=torch.float32, device=self.device)
        return PromptChunk(
            tokens=slice(start, start + plan.num_new),
            block_table=_own_blocks(plan, table_row),
            resident_start=plan.resident_start,
            logical_start=plan.position_start,
            num_survivors=plan.num_survivors,
            recent_start=plan.recent_start,
            num_sinks=plan.num_sinks,
            seed=plan.position_seed,
            first_scoring_query=plan.num_new if plan.pack_block_idx else first_scoring,
            first_window_query=first_window,
            destination_blocks=destination,
            splits=plan.splits,
            window_scores=window_scores,
        )

    def _restoring(self, planned: list[tuple[RequestPlan, torch.Tensor]]) -> Restoring:
        own, ends = [], []
        for plan, row in planned:
            num_blocks = num_pages(plan.resident_end, self.spec.block_size)
            own.append(_own_blocks(plan, row)[:num_blocks])
            ends += [plan.restored_end] * num_blocks
        host = torch.tensor(ends, pin_memory=self.device.type == "cuda")
        on_device = host.to(self.device, non_blocking=True)
        return Restoring(torch.cat(own), on_device, self.layer_names, self.layers)

    def _roll(
        self,
        step: Step,
        plans: Sequence[RequestPlan],
        common: CommonAttentionMetadata,
        limit: int,
    ) -> None:
        """Before the forward pass: positions counted anew, and those of the step's tokens."""
        for plan, row in zip(plans, common.block_table_tensor, strict=False):
            if plan.renumbers_from:
                blocks = row[: num_pages(plan.resident_start, self.spec.block_size)]
                renumbering = Renumbering(plan, blocks, list(self.layer_index), self.layers)
                renumbering.run(self.scoring.power > 0)
        if any(isinstance(packing, Rolled) for packing in step.packings):
            raise IntegrityError("positions of a step roll twice")
        rolled = Rolled.of(plans, common.positions, limit)
        if rolled is not None:
            step.packings.append(rolled)

    def _reach(self, plan: RequestPlan) -> int:
        return 0 if plan.evicts_together else self.scoring.reach

    def _packing(self, chunks: list[PromptChunk], reach: int) -> Packing:
        return Packing(
            chunks,
            self.layer_names,
            self.layers,
            self.kernels,
            replace(self.scoring, reach=reach),
            self.random_scores,
        )


def _own_blocks(plan: RequestPlan, row: torch.Tensor) -> torch.Tensor:
    """A row of the block table from the request's first block on, as long as it was."""
    return row.roll(-plan.first_block_idx) if plan.first_block_idx else row
