# SPDX-License-Identifier: Apache-2.0
"""Keeps the caches of finished requests, for requests that continue from there.

An *entry* is the cache of one request: its blocks, and the tokens that they stand for. The blocks
return to the end of the pool's queue as all do, and each is marked as one of vLLM's prefix cache,
with a hash that no other block has. Whatever makes vLLM forget a cached block forgets the mark:
the block is taken, or the whole cache is reset. An entry is valid while all its marks are there.

A request that continues gets blocks of its own, and the workers copy. Steps run in the order of
scheduling, so an entry needs no holder: its blocks may be taken in the same step, even by the
request that continues from it.

The name of an entry is that of its tokens (prefixes.py), with the budget and the weights that
computed it (weights.py). A request whose weights are replaced while it runs leaves no entry, and
publishes no more blocks for the prefix cache. A later turn that differs from an entry's answer is
counted (misses.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.request import Request, RequestStatus

from vllm_h2o.errors import IntegrityError
from vllm_h2o.policy import Budget
from vllm_h2o.scheduler.misses import Misses
from vllm_h2o.scheduler.prefixes import Name, Names, Prefixes
from vllm_h2o.scheduler.state import Left, RequestState
from vllm_h2o.scheduler.weights import Identity, Weights
from vllm_h2o.wire import Continuation

WHOLE = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_ABORTED,
    RequestStatus.FINISHED_REPETITION,
)
"""Status of finished requests whose blocks hold exactly their tokens."""


@dataclass(frozen=True, eq=False)
class Entry:
    """The cache of one finished request.

    Args:
        turn: its lengths.
        blocks: its blocks, in order.
        marks: the hash of each block.
        name: of its tokens.
        weights: that computed it.

    """

    turn: Left
    blocks: tuple[KVCacheBlock, ...]
    marks: tuple[BlockHashWithGroupId, ...]
    name: Name
    weights: Identity

    @property
    def is_whole(self) -> bool:
        """Whether the pool has taken or forgotten none of its blocks."""
        pairs = zip(self.blocks, self.marks, strict=True)
        return all(block.block_hash == mark for block, mark in pairs)

    def continued(self, blocks: Sequence[KVCacheBlock]) -> Continuation:
        """The copy that the workers make.

        Args:
            blocks: blocks of the request that continues, from its first slot on.

        """
        turn = self.turn
        return Continuation(
            source=tuple(block.block_id for block in self.blocks),
            blocks=tuple(block.block_id for block in blocks[: len(self.blocks)]),
            num_slots=turn.resident_len,
            restored_end=turn.restored_end,
        )


class Conversations:
    """The entries of one pool.

    Args:
        pool: vLLM's pool; it keeps hashes from now on, with prefix caching or without.
        group_id: of the policy's layers.
        hash_fn: vLLM's function of the prefix cache.

    """

    def __init__(self, pool: BlockPool, group_id: int, hash_fn: Callable[[object], bytes]) -> None:
        # A liberty: blocks with a hash are taken last, and lose it then.
        pool.enable_caching = True
        self._pool = pool
        self._names = Names(pool.hash_block_size, hash_fn)
        self._group_id = group_id
        self._numbers = count()
        self._entries: Prefixes[Entry] = Prefixes(self._names)
        self._misses = Misses(self._names)
        self._owners: dict[int, Entry] = {}
        self.weights = Weights(self._drop_replaced)

    def _drop_replaced(self) -> None:
        """Drop what other weights have computed: entries, and all of vLLM's prefix cache.

        VLLM's hashes name an adapter, but not its weights.
        """
        for entry in set(self._owners.values()):
            if not self.weights.holds(entry.weights):
                self._forget(entry)
        hashed = (block.block_id for block in self._pool.blocks if block.block_hash)
        self._pool.evict_blocks({i for i in hashed if i not in self._owners})

    def add(
        self, request: Request, state: RequestState, turn: Left, blocks: Sequence[KVCacheBlock]
    ) -> None:
        """Remember the cache of a request, before its blocks are freed.

        A request of which tokens after its last one were computed leaves no entry.

        Args:
            request: a request that ends.
            state: its lengths and limits.
            turn: the lengths of the entry.
            blocks: its blocks with these tokens.

        """
        if request.status not in WHOLE or request.resumable:
            return
        if turn.logical_len > request.num_tokens:
            return
        if any(block.is_null or block.ref_cnt != 1 or block.block_hash for block in blocks):
            return
        weights = self.weights.kept_by(request)
        if weights is None:
            return
        same = (state.budget, weights)
        name = self._names.name(request, turn.logical_len, same)
        if before := self._entries.get(name):
            self._forget(before)
        number = next(self._numbers).to_bytes(8, "big")
        marks = tuple(
            make_block_hash_with_group_id(
                BlockHash(b"kv-policy" + number + index.to_bytes(4, "big")), self._group_id
            )
            for index in range(len(blocks))
        )
        entry = Entry(turn, tuple(blocks), marks, name, weights)
        for block, mark in zip(blocks, marks, strict=True):
            if (owner := self._owners.get(block.block_id)) is not None:
                self._forget(owner)
            block.set_block_hash(mark)
            self._owners[block.block_id] = entry
        self._entries.put(name, entry)
        self._misses.add(entry, request, turn.logical_len, same)

    def find(self, request: Request, budget: Budget) -> Entry | None:
        """Find the longest entry that is shorter than a request's tokens and begins them.

        Args:
            request: a request that has begun, and holds nothing.
            budget: its own, or the engine's.

        """
        weights = self.weights.begun_with(request)
        if not self._entries or weights is None or not _may_continue(request):
            return None
        longest = request.num_tokens - 1
        found = self._entries.longest_first(request, (budget, weights), longest)
        return next((entry for entry in found if entry.is_whole), None)

    def is_miss(self, request: Request, budget: Budget, num_begun: int) -> bool:
        """Whether a request might have continued from more tokens than it does.

        Args:
            request: a request that takes its first blocks.
            budget: its own, or the engine's.
            num_begun: tokens that it need not compute.

        """
        weights = self.weights.begun_with(request)
        if weights is None or request.num_preemptions or not _may_continue(request):
            return False
        return self._misses.is_miss(request, (budget, weights), num_begun)

    def check_integrity(self) -> None:
        """Check that the blocks of entries are free.

        Raises:
            IntegrityError: when a request holds one.

        """
        entries = [entry for entry in self._entries.values() if entry.is_whole]
        held = [block.block_id for e in entries for block in e.blocks if block.ref_cnt]
        if held:
            raise IntegrityError(f"blocks {held} belong to an entry, but a request holds them")

    def _forget(self, entry: Entry) -> None:
        """Drop an entry; its blocks keep their places in the pool's queue."""
        self._entries.drop(entry.name, entry)
        self._misses.forget(entry)
        for block, mark in zip(entry.blocks, entry.marks, strict=True):
            if block.block_hash == mark:
                block.reset_hash()
            if self._owners.get(block.block_id) is entry:
                del self._owners[block.block_id]


def _may_continue(request: Request) -> bool:
    """Whether a request may use another's cache: no session, and not told to skip caches."""
    return not request.resumable and not request.skip_reading_prefix_cache
