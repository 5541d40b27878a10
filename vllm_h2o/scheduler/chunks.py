# SPDX-License-Identifier: Apache-2.0
"""Ends the chunks of a prompt so that queries that score together are computed in one step."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request

from vllm_h2o.scheduler.block_manager import HeavyHitterManager
from vllm_h2o.scheduler.ledger import Ledger
from vllm_h2o.scheduler.other_groups import OtherGroups
from vllm_h2o.scheduler.resumption import chunk_in


class CutsChunks(AsyncScheduler):
    """vLLM's scheduler, which asks the ledger for the size of a chunk in two places."""

    ledger: Ledger
    block_manager: HeavyHitterManager
    other_groups: OtherGroups

    def resumes_in_chunks(self, request: Request, found: KVCacheBlocks, num_found: int) -> bool:
        """Decide whether a request is evicted from after each chunk when it is computed again.

        Args:
            request: a request that holds nothing.
            found: its blocks in the prefix cache.
            num_found: tokens that it begins with, in those or from an earlier request.

        Returns:
            True if it is; then it shares no blocks.

        """
        request_id, end = request.request_id, request.num_tokens
        ledger, manager = self.ledger, self.block_manager
        ledger.resumed.pop(request_id, None)
        if end <= request.num_prompt_tokens:
            return False
        info, blocks = manager.info_of(request), found.blocks[manager.kv_cache_group_id]
        asked = (request_id, end, blocks, num_found, num_found, end)
        whole = manager.get_num_blocks_to_allocate(*asked, apply_admission_cap=True)
        others = manager.num_reserved + self.other_groups.num_to_admit(info)
        others += self.kv_cache_manager.watermark_blocks if self.running else 0
        free = manager.block_pool.get_num_free_blocks() - others
        if chunk := chunk_in(ledger, info, whole - manager.num_reserved, free):
            ledger.resumed[request_id] = chunk
        return chunk > 0

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Preempt a request. From now on chunks may have to end early: in its second life."""
        super()._preempt_request(request, *args, **kwargs)
        # HeavyHitterScheduler takes this liberty. It costs a call a request, so it is off before.
        self.need_mamba_block_aligned_split = True

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Keep queries that score together in one chunk, and drafts within free slots."""
        start = request.num_computed_tokens + num_new_local_computed_tokens
        start += num_external_computed_tokens
        prompt_end = self.block_manager.prompt_end_of(request)
        return self.ledger.align_chunk(request.request_id, start, num_new_tokens, prompt_end)

    def _try_schedule_encoder_inputs(
        self, request: Request, start: int, num_new: int, budget: int, *args: Any, **kwargs: Any
    ) -> Any:
        """End a chunk before an image without room in the encoder, or before the window.

        A chunk that begins at an image and must end within it is computed even with
        ``--disable-chunked-mm-input``: it would be put off forever.
        """
        ends_chunks = self.need_mamba_block_aligned_split
        asked = (request, start, num_new, budget)
        images, cut, *rest = super()._try_schedule_encoder_inputs(*asked, *args, **kwargs)
        if not cut and ends_chunks and self.scheduler_config.disable_chunked_mm_input:
            # A liberty: an option of vLLM's, off for one call.
            self.scheduler_config.disable_chunked_mm_input = False
            try:
                images, cut, *rest = super()._try_schedule_encoder_inputs(*asked, *args, **kwargs)
            finally:
                self.scheduler_config.disable_chunked_mm_input = True
        if not 0 < cut < num_new or not ends_chunks:
            return images, cut, *rest
        prompt_end = self.block_manager.prompt_end_of(request)
        cut = self.ledger.align_chunk(request.request_id, start, cut, prompt_end, True)
        if cut:
            return images, cut, *rest
        # A request that waits for the encoder's cache holds no room: two would wait for each other.
        self.encoder_cache_manager.free(request)
        return [], 0, budget, [], []
