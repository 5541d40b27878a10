# SPDX-License-Identifier: Apache-2.0
"""Publishes the entries of `continuation` among vLLM's KV cache events.

An entry is one ``BlockStored`` of all whole blocks of its tokens, and one ``BlockRemoved`` of the
same hashes. Entries may begin alike: whoever replays events counts each hash.
"""

from __future__ import annotations

from collections.abc import Hashable

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import ExternalBlockHash
from vllm.v1.request import Request

MEDIUM = "CONTINUATION"
"""Medium of these events. VLLM's own prefix cache has another, so both may be replayed apart."""


class EntryEvents:
    """The published entries of one pool.

    Args:
        pool: vLLM's pool, which queues events.
        group_id: of the policy's layers.

    """

    def __init__(self, pool: BlockPool, group_id: int) -> None:
        self._pool = pool
        self._group_id = group_id
        self._hashes: dict[Hashable, list[ExternalBlockHash]] = {}

    def stored(self, entry: Hashable, request: Request, num_tokens: int) -> None:
        """Publish an entry.

        Args:
            entry: the entry.
            request: the request that leaves it, whose whole blocks are hashed.
            num_tokens: tokens that it stands for.

        """
        size = self._pool.hash_block_size
        if num_blocks := num_tokens // size:
            self._pool.emit_cached_block_events(request, num_blocks, size, self._group_id)
            event = self._pool.kv_event_queue[-1]
            assert isinstance(event, BlockStored)
            event.medium = MEDIUM
            self._hashes[entry] = event.block_hashes

    def clear(self) -> None:
        """Forget what was published: vLLM publishes that all is gone."""
        self._hashes.clear()

    def removed(self, entry: Hashable) -> None:
        """Publish that an entry is gone, if it was published."""
        if hashes := self._hashes.pop(entry, None):
            self._pool.kv_event_queue.append(BlockRemoved(hashes, MEDIUM, self._group_id))
