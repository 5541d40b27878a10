"""Pages of a request: as many as its resident tokens need; the prompt's tail goes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from vllm_h2o.errors import IntegrityError
from vllm_h2o.policy import Budget
from vllm_h2o.scheduler.ledger import Ledger
from vllm_h2o.scheduler.spec import HeavyHitterSpec
from vllm_h2o.wire import RequestPlan

BudgetOf = Callable[[Request], Budget | None]
"""A request's own budget."""


def _no_budget_of_its_own(request: Request) -> None:
    return None


class HeavyHitterManager(FullAttentionManager):
    """Grants pages by resident length.

    ``allocate_slots`` calls, for each request of a step::

        get_num_blocks_to_allocate   once or twice, perhaps followed by failure: previews
        allocate_new_blocks          once, after the pool was found large enough: commits

    The step that computes the last prompt token packs the survivors into the first pages; the pages
    behind them are freed when the next step starts, because steps run in the order of scheduling.
    Where every chunk packs, the next chunk takes the pages behind the survivors again.
    """

    def __init__(self, kv_cache_spec: HeavyHitterSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._ledger: Ledger | None = None
        self._requests: Mapping[str, Request] = {}
        self._budget_of: BudgetOf = _no_budget_of_its_own
        self._largest_chunk = 0
        self._packed: list[str] = []

    def bind(
        self,
        ledger: Ledger,
        requests: Mapping[str, Request],
        budget_of: BudgetOf | None = None,
        largest_chunk: int = 0,
    ) -> None:
        """Give the manager what it counts with.

        Args:
            ledger: the lengths.
            requests: vLLM's live requests, by id.
            budget_of: a request's own budget; None where all have the ledger's.
            largest_chunk: most tokens of one step; read where chunks are packed.

        """
        self._ledger, self._requests = ledger, requests
        self._budget_of = budget_of or _no_budget_of_its_own
        self._largest_chunk = largest_chunk

    @property
    def ledger(self) -> Ledger:
        """The ledger.

        Raises:
            IntegrityError: when no scheduler has bound one.

        """
        if self._ledger is None:
            raise IntegrityError("HeavyHitterManager is used without HeavyHitterScheduler")
        return self._ledger

    def _preview(self, request_id: str, num_computed: int, num_tokens: int) -> RequestPlan:
        request = self._requests[request_id]
        params = request.sampling_params
        return self.ledger.preview(
            request_id,
            num_computed,
            num_tokens,
            prompt_len=request.num_tokens,
            seed=params.seed if params else None,
            budget=self._own_budget(request),
        )

    def _own_budget(self, request: Request) -> Budget | None:
        """Worked out when the request holds nothing; afterwards the ledger knows."""
        held = request.request_id in self.ledger.residencies
        return None if held else self._budget_of(request)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Pages that computing tokens [total_computed_tokens, num_tokens) takes from the pool."""
        plan = self._preview(request_id, total_computed_tokens, num_tokens)
        held = len(self.req_to_blocks.get(request_id, ()))
        most = plan.attended
        if apply_admission_cap and self.ledger.packs_chunks and plan.in_prompt:
            # The whole prompt at once, which never comes: each chunk leaves C - 1 tokens behind.
            most = min(most, plan.capacity - 1 + self._largest_chunk)
        return max(self.ledger.num_pages(most) - held, 0)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Take the pages and commit the plan."""
        held = self.ledger.residencies.get(request_id)
        plan = self._preview(request_id, held.logical_len if held else 0, num_tokens)
        new_blocks = super().allocate_new_blocks(request_id, plan.attended, plan.attended)
        request = self._requests[request_id]
        self.ledger.commit(request_id, plan, request.num_tokens, self._own_budget(request))
        if plan.keep_after and plan.logical_end == self.ledger.residencies[request_id].prompt_end:
            self._packed.append(request_id)
        return new_blocks

    def new_step_starts(self) -> None:
        """Free the pages behind the survivors that the last step packed."""
        for request_id in self._packed:
            residency = self.ledger.residencies.get(request_id)
            if residency is None:
                continue
            blocks = self.req_to_blocks[request_id]
            keep = self.ledger.num_pages(residency.held_len)
            self.ledger.counts.pages_freed_early += len(blocks) - keep
            self.block_pool.free_blocks(reversed(blocks[keep:]))
            del blocks[keep:]
        self._packed.clear()

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Hand out the request's pages for freeing, and forget its lengths."""
        self.ledger.close(request_id)
        return super().pop_blocks_for_free(request_id)

    def check_integrity(self) -> None:
        """Count every page and every length.

        Raises:
            IntegrityError: with all numbers, when a page is lost, held twice, or belongs to nobody.

        """
        held = [block for blocks in self.req_to_blocks.values() for block in blocks]
        ids = [block.block_id for block in held]
        num_free = self.block_pool.get_num_free_blocks()
        total = self.block_pool.num_gpu_blocks - 1  # the null block is nobody's
        wrong_refs = [block.block_id for block in held if block.ref_cnt != 1]
        owners = {request_id for request_id, blocks in self.req_to_blocks.items() if blocks}
        misfits = {
            request_id: (len(self.req_to_blocks[request_id]), residency)
            for request_id, residency in self.ledger.residencies.items()
            if request_id not in self._packed
            and len(self.req_to_blocks[request_id]) != self.ledger.num_pages(residency.held_len)
        }
        if (
            num_free + len(held) != total
            or len(set(ids)) != len(ids)
            or self.block_pool.null_block.block_id in ids
            or wrong_refs
            or owners != set(self.ledger.residencies)
            or misfits
        ):
            raise IntegrityError(
                f"pages: {num_free} free + {len(held)} held of {total}; {len(set(ids))} different; "
                f"reference count not 1: {wrong_refs}; owners without lengths or lengths without "
                f"owners: {owners ^ set(self.ledger.residencies)}; (pages, lengths) that do not "
                f"fit: {misfits}"
            )


def register_manager() -> None:
    """Tell vLLM's registry which manager keeps the pages of :class:`HeavyHitterSpec`."""
    # The registry fills itself with vLLM's own specs only while it is empty.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(HeavyHitterSpec, HeavyHitterManager, FullAttentionSpec)


register_manager()
