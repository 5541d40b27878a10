"""What requests leave when they end, for those that go on from there.

An *entry* is what one request held: its pages, and how many tokens they stand for. The pages go
back to the pool as all do, at the end of its queue, and each is marked as one that vLLM's prefix
cache knows: with a hash, of which there is no other. Whatever makes vLLM forget a cached page
forgets the mark: when the page is taken, and when all of the cache is reset. An entry is there as
long as all its marks are.

Who continues gets pages of its own, and the workers copy. Steps run in the order of scheduling, so
nobody has to hold an entry: it may be taken, even by who continues from it, in the same step.

An entry's key is the hash that vLLM makes of its last whole block and all before it, which takes in
adapter and salt, the tokens after it as they are, and the budget. As with vLLM's own cache, two
texts of one hash are taken for the same.
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
from vllm_h2o.wire import Continuation

WHOLE = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_ABORTED,
    RequestStatus.FINISHED_REPETITION,
)
"""How requests end whose tokens are what their pages hold."""

Start = tuple[BlockHash | None, Budget, int]
"""Of an entry's key: the whole blocks, the budget, and the seed where it counts."""
End = tuple[tuple[int, ...], Hashable]
"""The tokens after those, and what vLLM would hash with them."""


@dataclass(frozen=True, eq=False)
class Entry:
    """What one request has left.

    Args:
        turn: in numbers.
        blocks: its pages, in their order.
        marks: what each bears.
        key: under which it is found.

    """

    turn: Left
    blocks: tuple[KVCacheBlock, ...]
    marks: tuple[BlockHashWithGroupId, ...]
    key: tuple[Start, End]

    @property
    def is_whole(self) -> bool:
        """Whether no page was taken, or forgotten."""
        pairs = zip(self.blocks, self.marks, strict=True)
        return all(block.block_hash == mark for block, mark in pairs)

    def continued(self, blocks: Sequence[KVCacheBlock]) -> Continuation:
        """What is copied, for the workers.

        Args:
            blocks: pages of who continues, from its first slot on.

        """
        turn = self.turn
        return Continuation(
            source=tuple(block.block_id for block in self.blocks),
            blocks=tuple(block.block_id for block in blocks[: len(self.blocks)]),
            num_slots=turn.num_slots,
            num_free_slots=turn.num_free_slots,
            restored_end=turn.restored_end,
        )


class Conversations:
    """The entries of one pool.

    Args:
        pool: vLLM's; it keeps marks from now on, whether prefixes are cached or not.
        group_id: of the policy's layers.
        hash_fn: vLLM's, of the prefix cache.
        by_seed: whether it depends on the seed which tokens stay.

    """

    def __init__(
        self,
        pool: BlockPool,
        group_id: int,
        hash_fn: Callable[[object], bytes],
        by_seed: bool = False,
    ) -> None:
        # A liberty: pages that bear a hash are taken last, and lose it then.
        pool.enable_caching = True
        init_none_hash(hash_fn)
        self._block_size: int = pool.hash_block_size
        self._hasher = get_request_block_hasher(self._block_size, hash_fn)
        self._group_id, self._by_seed = group_id, by_seed
        self._numbers = count()
        self._found: dict[Start, dict[End, Entry]] = {}
        self._owners: dict[int, Entry] = {}
        self._num_blocks: Counter[int] = Counter()  # of how many entries, by their whole blocks

    def add(
        self, request: Request, state: RequestState, turn: Left, blocks: Sequence[KVCacheBlock]
    ) -> None:
        """Remember what a request leaves, before its pages are freed.

        Nothing is, where tokens were computed that are not the request's: after its last one.

        Args:
            request: one that ends.
            state: its lengths and limits.
            turn: what it leaves.
            blocks: its pages that hold this.

        """
        if request.status not in WHOLE or request.resumable:
            return
        if turn.logical_len > request.num_tokens:
            return
        if any(block.is_null or block.ref_cnt != 1 or block.block_hash for block in blocks):
            return
        start, end = self._key(request, state.budget, state.seed, turn.logical_len)
        if before := self._found.get(start, {}).get(end):
            self._forget(before)
        number = next(self._numbers).to_bytes(8, "big")
        marks = tuple(
            make_block_hash_with_group_id(
                BlockHash(b"kv-policy" + number + index.to_bytes(4, "big")), self._group_id
            )
            for index in range(len(blocks))
        )
        entry = Entry(turn, tuple(blocks), marks, (start, end))
        for block, mark in zip(blocks, marks, strict=True):
            if (owner := self._owners.get(block.block_id)) is not None:
                self._forget(owner)
            block.set_block_hash(mark)
            self._owners[block.block_id] = entry
        self._found.setdefault(start, {})[end] = entry
        self._num_blocks[turn.logical_len // self._block_size] += 1

    def find(self, request: Request, budget: Budget, seed: int) -> Entry | None:
        """The longest entry that a request's tokens begin with, and have more.

        Args:
            request: one that holds nothing.
            budget: its own, or that of all.
            seed: likewise.

        """
        if not self._found or request.resumable or request.skip_reading_prefix_cache:
            return None
        self._update_hashes(request)
        longest = request.num_tokens - 1
        for num_blocks in sorted(self._num_blocks, reverse=True):
            if num_blocks > longest // self._block_size:
                continue
            known = self._found.get(self._start(request, budget, seed, num_blocks), {})
            for end in sorted(known, key=lambda end: -len(end[0])):
                length = num_blocks * self._block_size + len(end[0])
                if length > longest or end != self._end(request, length):
                    continue
                if known[end].is_whole:
                    return known[end]
        return None

    def check_integrity(self) -> None:
        """Whether the pages of entries are free.

        Raises:
            IntegrityError: when somebody holds one.

        """
        entries = [entry for known in self._found.values() for entry in known.values()]
        held = [b.block_id for e in entries if e.is_whole for b in e.blocks if b.ref_cnt]
        if held:
            raise IntegrityError(f"pages {held} are remembered, and somebody holds them")

    def _key(self, request: Request, budget: Budget, seed: int, length: int) -> tuple[Start, End]:
        self._update_hashes(request)
        start = self._start(request, budget, seed, length // self._block_size)
        return start, self._end(request, length)

    def _start(self, request: Request, budget: Budget, seed: int, num_blocks: int) -> Start:
        whole = request.block_hashes[num_blocks - 1] if num_blocks else None
        return whole, budget, seed if self._by_seed else 0

    def _end(self, request: Request, length: int) -> End:
        """Of its first ``length`` tokens, those after the whole blocks."""
        start = length // self._block_size * self._block_size
        extra_keys, _ = generate_block_hash_extra_keys(request, start, length, 0)
        return tuple(request.all_token_ids[start:length]), extra_keys

    def _update_hashes(self, request: Request) -> None:
        """vLLM hashes where prefixes are cached; elsewhere it is done when somebody asks."""
        request.block_hashes.extend(self._hasher(request))

    def _forget(self, entry: Entry) -> None:
        """Drop an entry; its pages stay where they are in the pool's queue."""
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
