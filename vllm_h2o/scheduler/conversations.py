# SPDX-License-Identifier: Apache-2.0
"""Keeps the caches of finished requests, for requests that continue from there.

An *entry* is the cache of one request: its blocks, and the tokens that they stand for. The blocks
return to the end of the pool's queue as all do, and each is marked as one of vLLM's prefix cache,
with a hash that no other block has. Whatever makes vLLM forget a cached block forgets the mark:
the block is taken, or the whole cache is reset. An entry is valid while all its marks are there.

A request that continues gets blocks of its own, and the workers copy. Steps run in the order of
scheduling, so an entry needs no holder: its blocks may be taken in the same step, even by the
request that continues from it.

The key of an entry is vLLM's hash of its last whole block and all before it, which includes adapter
and salt, the tokens after that block, the budget, and the weights that computed it (weights.py). As
in vLLM's own cache, two texts of one hash pass for the same. A request whose weights are replaced
while it runs leaves no entry, and publishes no more blocks for the prefix cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    generate_block_hash_extra_keys,
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.request import Request, RequestStatus

from vllm_h2o.errors import IntegrityError
from vllm_h2o.policy import Budget
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

Start = tuple[BlockHash | None, Budget, Identity]
"""First half of a key: the whole blocks, the budget and the weights."""
End = tuple[tuple[int, ...], Hashable]
"""Second half: the tokens after those blocks, and the keys that vLLM would hash with them."""


@dataclass(frozen=True, eq=False)
class Entry:
    """The cache of one finished request.

    Args:
        turn: its lengths.
        blocks: its blocks, in order.
        marks: the hash of each block.
        key: under which it is found.
        weights: that computed it.

    """

    turn: Left
    blocks: tuple[KVCacheBlock, ...]
    marks: tuple[BlockHashWithGroupId, ...]
    key: tuple[Start, End]
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
        init_none_hash(hash_fn)
        self._block_size: int = pool.hash_block_size
        self._hasher = get_request_block_hasher(self._block_size, hash_fn)
        self._group_id = group_id
        self._numbers = count()
        self._found: dict[Start, dict[End, Entry]] = {}
        self._owners: dict[int, Entry] = {}
        self._num_blocks: Counter[int] = Counter()  # entries, by the number of their whole blocks
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
        start, end = self._key(request, state.budget, weights, turn.logical_len)
        if before := self._found.get(start, {}).get(end):
            self._forget(before)
        number = next(self._numbers).to_bytes(8, "big")
        marks = tuple(
            make_block_hash_with_group_id(
                BlockHash(b"kv-policy" + number + index.to_bytes(4, "big")), self._group_id
            )
            for index in range(len(blocks))
        )
        entry = Entry(turn, tuple(blocks), marks, (start, end), weights)
        for block, mark in zip(blocks, marks, strict=True):
            if (owner := self._owners.get(block.block_id)) is not None:
                self._forget(owner)
            block.set_block_hash(mark)
            self._owners[block.block_id] = entry
        self._found.setdefault(start, {})[end] = entry
        self._num_blocks[turn.logical_len // self._block_size] += 1

    def find(self, request: Request, budget: Budget) -> Entry | None:
        """Find the longest entry that is shorter than a request's tokens and begins them.

        Args:
            request: a request that has begun, and holds nothing.
            budget: its own, or the engine's.

        """
        weights = self.weights.begun_with(request)
        if not self._found or weights is None:
            return None
        if request.resumable or request.skip_reading_prefix_cache:
            return None
        self._update_hashes(request)
        longest = request.num_tokens - 1
        for num_blocks in sorted(self._num_blocks, reverse=True):
            if num_blocks > longest // self._block_size:
                continue
            known = self._found.get(self._start(request, budget, weights, num_blocks), {})
            for end in sorted(known, key=lambda end: -len(end[0])):
                length = num_blocks * self._block_size + len(end[0])
                if length > longest or end != self._end(request, length):
                    continue
                if known[end].is_whole:
                    return known[end]
        return None

    def check_integrity(self) -> None:
        """Check that the blocks of entries are free.

        Raises:
            IntegrityError: when a request holds one.

        """
        entries = [entry for known in self._found.values() for entry in known.values()]
        held = [b.block_id for e in entries if e.is_whole for b in e.blocks if b.ref_cnt]
        if held:
            raise IntegrityError(f"blocks {held} belong to an entry, but a request holds them")

    def _key(
        self, request: Request, budget: Budget, weights: Identity, length: int
    ) -> tuple[Start, End]:
        self._update_hashes(request)
        start = self._start(request, budget, weights, length // self._block_size)
        return start, self._end(request, length)

    def _start(self, request: Request, budget: Budget, weights: Identity, num_blocks: int) -> Start:
        whole = request.block_hashes[num_blocks - 1] if num_blocks else None
        return whole, budget, weights

    def _end(self, request: Request, length: int) -> End:
        """Tokens after the whole blocks of a request's first ``length`` tokens."""
        start = length // self._block_size * self._block_size
        extra_keys, _ = generate_block_hash_extra_keys(request, start, length, 0)
        return tuple(request.all_token_ids[start:length]), extra_keys

    def _update_hashes(self, request: Request) -> None:
        """Hash a request's whole blocks. vLLM does this itself only with prefix caching."""
        request.block_hashes.extend(self._hasher(request))

    def _forget(self, entry: Entry) -> None:
        """Drop an entry; its blocks keep their places in the pool's queue."""
        start, end = entry.key
        known = self._found.get(start, {})
        if known.get(end) is entry:
            del known[end]
            num_blocks = entry.turn.logical_len // self._block_size
            self._num_blocks[num_blocks] -= 1
            if not self._num_blocks[num_blocks]:
                del self._num_blocks[num_blocks]
            if not known:
                del self._found[start]
        for block, mark in zip(entry.blocks, entry.marks, strict=True):
            if block.block_hash == mark:
                block.reset_hash()
            if self._owners.get(block.block_id) is entry:
                del self._owners[block.block_id]
