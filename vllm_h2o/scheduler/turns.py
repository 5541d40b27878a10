# SPDX-License-Identifier: Apache-2.0
"""Keeps what requests hold when they end, and begins others with it: conversations.py has the book.

The pages that a next turn takes are filled before its step, and the step must not clear them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.scheduler.block_manager import HeavyHitterManager
from vllm_h2o.scheduler.conversations import Conversations
from vllm_h2o.scheduler.folder import folder_of
from vllm_h2o.scheduler.other_groups import OtherGroups
from vllm_h2o.wire import Continuation


class KeepsTurns(Scheduler):
    """vLLM's scheduler, whose requests leave their pages to others.

    Attributes:
        continued: copies with which requests of the step that is being scheduled begin.

    """

    policy_config: KVPolicyConfig
    block_manager: HeavyHitterManager
    other_groups: OtherGroups
    conversations: Conversations | None
    continued: dict[str, Continuation]

    def keep_turns(self) -> Conversations:
        """An empty book of what requests leave, and the files that are there."""
        hash_fn = get_hash_fn_by_name(self.cache_config.prefix_caching_hash_algo)
        manager, group_id = self.block_manager, self.block_manager.kv_cache_group_id
        num_layers = max(len(group.layer_names) for group in self.kv_cache_config.kv_cache_groups)
        page_bytes = num_layers * manager.kv_cache_spec.page_size_bytes
        if not self.cache_config.enable_prefix_caching:
            # A liberty: beside states vLLM hashes blocks of the longest sequence. Nobody else does.
            manager.block_pool.hash_block_size = manager.block_size
        num_host_pages = self.policy_config.continuation_host_bytes // page_bytes
        self.folder = folder_of(self.vllm_config, self.policy_config, page_bytes)
        return Conversations(manager.block_pool, group_id, hash_fn, num_host_pages, self.folder)

    def take_copies(self) -> dict[str, Any]:
        """Copies that precede a step which has been scheduled, by field of its plan."""
        copies: dict[str, Any] = {"continued": self.continued}
        if self.conversations is not None:
            copies["saved"], copies["dropped"] = self.conversations.take(self.continued)
        return copies

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Reset the cache, and drop what host memory holds."""
        is_reset: bool = super().reset_prefix_cache(*args, **kwargs)
        if is_reset and self.conversations is not None:
            self.conversations.clear()
        return is_reset

    def _free_request_blocks(self, request: Request) -> None:
        """Hand out a request's blocks, but those that it leaves to another."""
        self._remember(request)
        super()._free_request_blocks(request)

    def _remember(self, request: Request) -> None:
        """Leave the cache of a request that ends past its prompt to one that continues it."""
        manager, request_id = self.block_manager, request.request_id
        state = manager.ledger.states.get(request_id)
        if self.conversations is None or state is None or state.in_prompt:
            return
        turn = state.left(manager.ledger.rules.lifetime)
        start = state.first_block_idx
        end = start + manager.ledger.num_pages(turn.num_slots)
        row, states = manager.req_to_blocks[request_id], self.other_groups.states_of(request_id)
        if self.conversations.add(request, state, turn, [*row[start:end], *chain(*states)]):
            del row[start:end]
            for blocks in states:
                blocks.clear()

    def _get_new_block_ids_to_zero(self) -> list[int] | None:
        """Ids of the blocks that a step clears, once it has taken all: but those of copies."""
        ids, self.continued = super()._get_new_block_ids_to_zero(), {}
        for request_id, each in self.block_manager.take_continued().items():
            states = chain(*self.other_groups.states_of(request_id))
            blocks = (*each.blocks, *(block.block_id for block in states))
            self.continued[request_id] = replace(each, blocks=blocks)
        filled = {block for each in self.continued.values() for block in each.blocks}
        return [block for block in ids or () if block not in filled] or None
