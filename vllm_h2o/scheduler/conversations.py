# SPDX-License-Identifier: Apache-2.0
"""Keeps the caches of finished requests, for requests that continue from there.

An *entry* is the cache of one request: its blocks, and the tokens that they stand for. The blocks
are free, at the end of the pool's queue. The pool tells when it hands out one of them, or when the
whole cache is reset: then the entry is forgotten, or it moves to host memory (host.py), and from
there to files (folder.py).

A request that continues gets blocks of its own, and the workers copy. Steps run in the order of
scheduling, so an entry needs no holder: its blocks may be taken in the same step, even by the
request that continues from it.

What a request asks to keep is also written to files at once, for other engines.

The name of an entry is that of its tokens (prefixes.py), with the budget and the weights that
computed it (weights.py). A request whose weights are replaced while it runs leaves no entry, and
publishes no more blocks for the prefix cache. A later turn that differs from an entry's answer is
counted (misses.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import merge

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from vllm_h2o.errors import IntegrityError
from vllm_h2o.options.request import asks_to_save, beyond_text
from vllm_h2o.policy import Budget
from vllm_h2o.scheduler.entry import Entry
from vllm_h2o.scheduler.events import EntryEvents
from vllm_h2o.scheduler.folder import Folder
from vllm_h2o.scheduler.host import HostMemory
from vllm_h2o.scheduler.kept import Kept
from vllm_h2o.scheduler.misses import Misses
from vllm_h2o.scheduler.prefixes import Name, Names, Prefixes
from vllm_h2o.scheduler.state import Left, RequestState
from vllm_h2o.scheduler.weights import FIRST, Identity, Weights
from vllm_h2o.wire import Continuation, Saved

logger = init_logger("vllm.kv_policy")

WHOLE = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_ABORTED,
    RequestStatus.FINISHED_REPETITION,
)
"""Status of finished requests whose blocks hold exactly their tokens."""
LOST = (
    "its tokens were computed with other weights than the engine began with, or past its last one, "
    "or lie in pages that the prefix cache holds"
)
"""Why a request leaves nothing to be kept."""
FOUND_PER_STEP = 16
"""Fewest tokens to save for each token that takes a step of its own, where KV heads share slots:
else it is faster to compute them, in chunks."""


class Conversations:
    """The entries of one pool.

    Args:
        pool: vLLM's pool.
        group_id: of the policy's layers.
        hash_fn: vLLM's function of the prefix cache.
        num_host_pages: most pages of entries in host memory.
        folder: keeps entries of requests that ask for it; None: nothing does.

    """

    def __init__(
        self,
        pool: BlockPool,
        group_id: int,
        hash_fn: Callable[[object], bytes],
        num_host_pages: int = 0,
        folder: Folder | None = None,
    ) -> None:
        self._pool = pool
        self._names = Names(pool.hash_block_size, hash_fn)
        self._entries: Prefixes[Entry] = Prefixes(self._names)
        self._on_host: dict[int, Entry] = {}
        self._used: set[Name] = set()
        self.host = HostMemory(num_host_pages)
        self._misses = Misses(self._names)
        self._events = EntryEvents(pool, group_id) if pool.enable_kv_cache_events else None
        self.weights = Weights(self._drop_replaced)
        self._folder = folder
        self._kept: Prefixes[Entry] = Prefixes(self._names)
        self._kept_at: dict[str, Entry] = {}
        self._keep_all(folder.read() if folder else ())

    def _drop_replaced(self) -> None:
        """Drop what other weights have computed: entries, and all of vLLM's prefix cache.

        VLLM's hashes name an adapter, but not its weights.
        """
        for entry in list(self._entries.values()):
            if not self.weights.holds(entry.weights):
                self._forget(entry)
        if not self.weights.holds(FIRST):
            self._forget_kept()
        hashed = {block.block_id for block in self._pool.blocks if block.block_hash}
        self._pool.evict_blocks(hashed)

    def add(
        self, request: Request, state: RequestState, turn: Left, blocks: Sequence[KVCacheBlock]
    ) -> bool:
        """Remember the cache of a request, and free its blocks.

        A request of which tokens after its last one were computed leaves no entry.

        Args:
            request: a request that ends.
            state: its lengths and limits.
            turn: the lengths of the entry.
            blocks: its blocks with these tokens.

        Returns:
            Whether it leaves an entry. If not, it still holds the blocks.

        """
        weights = self._weights_of(request, turn, blocks)
        if weights is None:
            self._say_lost(request)
            return False
        same = (state.budget, weights)
        name = self._names.name(request, turn.logical_len, same)
        if before := self._entries.get(name):
            self._forget(before)
        entry = Entry(turn, tuple(blocks), name, weights)
        if weights == FIRST:
            entry = self._keep_of(request, state.budget, entry)
        else:
            self._say_lost(request)
        self._leave_in_pool(entry)
        self._entries.put(name, entry)
        self._misses.add(name, request, turn.logical_len, same)
        if self._events:
            self._events.stored(name, request, turn.logical_len)
        return True

    def _weights_of(
        self, request: Request, turn: Left, blocks: Sequence[KVCacheBlock]
    ) -> Identity | None:
        """The weights that computed what a request leaves; None: it leaves nothing."""
        if request.status not in WHOLE or request.resumable:
            return None
        if turn.logical_len > request.num_tokens:
            return None
        if any(block.is_null or block.ref_cnt != 1 or block.block_hash for block in blocks):
            return None
        return self.weights.kept_by(request)

    def _say_lost(self, request: Request) -> None:
        """Warn that a request which asked to be kept is not."""
        if self._folder and asks_to_save(request) and request.is_finished():
            logger.warning("request %s asked to be kept, and is not: %s", request.request_id, LOST)

    def _keep_of(self, request: Request, budget: Budget, entry: Entry) -> Entry:
        """Have an entry written if its request asks for it, and note what its files say.

        Args:
            request: that leaves it.
            budget: of the request.
            entry: computed with the first weights.

        """
        folder = self._folder
        if folder is None:
            return entry
        if asks_to_save(request):
            kept = Kept.of(request, budget, entry.turn)
            place = folder.save(kept, entry.source, request.request_id)
            self._keep(entry.name, entry.turn, place)
            return replace(entry, kept=replace(kept, place=place))
        if folder.takes_dropped and not beyond_text(request):
            return replace(entry, kept=Kept.of(request, budget, entry.turn))
        return entry

    def _keep(self, name: Name, turn: Left, place: str) -> None:
        """Let requests continue from what is in files, or is about to be."""
        self._kept_at[place] = entry = Entry(turn, (), name, FIRST, place)
        self._kept.put(name, entry)

    def _keep_all(self, prompts: Iterable[Kept]) -> None:
        """Let requests continue from what others have written."""
        for kept in prompts:
            turn = kept.turn
            name = self._names.name(kept.request(), turn.logical_len, (kept.budget, FIRST))
            self._keep(name, turn, kept.place)

    def _forget_kept(self) -> None:
        """Know of no files until the engine starts again: other weights may have replaced those."""
        self._kept = Prefixes(self._names)
        self._kept_at.clear()
        if self._folder:
            self._folder.forget()

    def find(self, request: Request, budget: Budget, num_cached: int = 0) -> Entry | None:
        """Find the longest entry that is shorter than a request's tokens and begins them.

        Its files, if it is in such, are open until the step that is being scheduled has ended.

        Args:
            request: a request that has begun, and holds nothing.
            budget: its own, or the engine's.
            num_cached: tokens that it need not compute if it continues from none.

        """
        weights = self.weights.begun_with(request)
        for entry in self._longest_first(request, budget, weights, num_cached):
            if self._folder is None or not isinstance(entry.place, str):
                return entry
            if files := self._folder.open(entry.place):
                return replace(entry, place=files)
        return None

    def is_checking(self, request: Request, budget: Budget) -> bool:
        """Whether files from which a request would continue are being checked.

        What vLLM's prefix cache has of its tokens is not known yet: it may have enough of them.

        Args:
            request: a request that holds nothing.
            budget: its own, or the engine's.

        """
        if self._folder is None or request.lora_request:
            return False
        for entry in self._longest_first(request, budget, self.weights.of(request), 0):
            if not isinstance(entry.place, str):
                return False
            if (is_whole := self._folder.is_whole(entry.place)) is not False:
                return is_whole is None
        return False

    def _longest_first(
        self, request: Request, budget: Budget, weights: Identity | None, num_cached: int
    ) -> Iterator[Entry]:
        """Entries from which a request may continue, if their files are there."""
        if weights is None or not _may_continue(request):
            return
        if self._folder:
            for entry in filter(None, (self._kept_at.pop(p, None) for p in self._folder.look())):
                self._kept.drop(entry.name, entry)
                self._folder.num_gone += 1
            self._keep_all(self._folder.read_new())
        own = (request, (budget, weights), request.num_tokens - 1)
        known = (entries.longest_first(*own) for entries in (self._entries, self._kept) if entries)
        for entry in merge(*known, key=lambda entry: -entry.turn.logical_len):
            if _saves_enough(entry.turn, request, num_cached):
                yield entry

    def use(self, entry: Entry) -> None:
        """Make an entry the newest, from the second request on that continues from it.

        The first one is often the next turn, which leaves an entry of its own.

        Args:
            entry: found for a request that is about to take its blocks.

        """
        if isinstance(entry.place, tuple):
            return
        if self._folder and entry.kept:
            self._folder.touch(entry.kept.place)
        if entry.name not in self._used:
            self._used.add(entry.name)
        elif isinstance(entry.place, int):
            self.host.use(entry.place)
        else:
            self._pool.touch(entry.blocks)
            self._leave_in_pool(entry)

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
            IntegrityError: when a request holds one, or host memory is miscounted.

        """
        self.host.check_integrity(
            {entry.place for entry in self._entries.values() if isinstance(entry.place, int)}
        )
        blocks = (block for entry in self._entries.values() for block in entry.blocks)
        held = [block.block_id for block in blocks if block.ref_cnt]
        if held:
            raise IntegrityError(f"blocks {held} belong to an entry, but a request holds them")

    def clear(self) -> None:
        """Forget all entries, after a reset of the whole cache has left some in host memory."""
        if self._events:
            self._events.clear()
        for entry in list(self._entries.values()):
            self._forget(entry)
        self.host.forget_copies()
        self._forget_kept()

    def take(
        self, continued: Mapping[str, Continuation]
    ) -> tuple[tuple[Saved, ...], tuple[int, ...]]:
        """Take what a step copies to host memory and to files, and what host memory drops.

        Args:
            continued: copies with which requests of the step begin.

        """
        saved, dropped = self.host.take()
        if self._folder is None:
            return saved, dropped
        self._folder.keep_open(continued)
        return saved + self._folder.take(), dropped

    def take_counts(self) -> dict[str, int]:
        """Take the counts since the last report, by field of ``PolicyStats``."""
        of_folder = self._folder.take_counts() if self._folder else {}
        return {**self.host.take_counts(), **of_folder}

    def _leave_in_pool(self, entry: Entry) -> None:
        """Free an entry's blocks, behind all that are free, until the pool needs them."""
        blocks = reversed(entry.blocks)
        self._pool.unpin_blocks(blocks, lambda _: self._leave_blocks(entry))

    def _leave_blocks(self, entry: Entry) -> None:
        """Move an entry whose blocks are taken to host memory, or to files, or forget it."""
        if self._entries.get(entry.name) is not entry:
            return
        if len(entry.blocks) > self.host.num_pages:
            self._leave_memory(entry, entry.source)
            return
        for number in self.host.too_many(len(entry.blocks)):
            self._leave_memory(self._on_host[number], number)
        number = self.host.save(entry.source, entry.turn.num_used)
        self._on_host[number] = moved = replace(entry, blocks=(), place=number)
        self._entries.put(entry.name, moved)

    def _leave_memory(self, entry: Entry, source: tuple[int, ...] | int) -> None:
        """Write an entry for which there is no room to files, if they take it, and forget it."""
        self._forget(entry)
        folder = self._folder if self._folder and self._folder.takes_dropped else None
        place = folder.save_late(entry.kept, source) if folder and entry.kept else None
        if place is not None:
            self._keep(entry.name, entry.turn, place)

    def _forget(self, entry: Entry) -> None:
        """Drop an entry that is known; its blocks keep their places in the pool's queue."""
        self._entries.drop(entry.name, entry)
        self._misses.forget(entry.name)
        self._used.discard(entry.name)
        if self._events:
            self._events.removed(entry.name)
        if isinstance(entry.place, int):
            del self._on_host[entry.place]
            self.host.drop(entry.place)


def _saves_enough(turn: Left, request: Request, num_cached: int) -> bool:
    """Whether a request that continues saves tokens, and many if each of its own takes a step."""
    if turn.is_followed_by(request.num_tokens):
        return True  # the prefix cache may have as many tokens, but not what is left of them
    num_saved = turn.logical_len - num_cached
    num_new = request.num_tokens - turn.logical_len
    steps = num_new if turn.is_split else 0
    return num_saved > 0 and FOUND_PER_STEP * steps <= num_saved


def _may_continue(request: Request) -> bool:
    """Whether a request may use another's cache: no session, and not told to skip caches."""
    return not request.resumable and not request.skip_reading_prefix_cache
