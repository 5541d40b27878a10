# SPDX-License-Identifier: Apache-2.0
"""The block manager: grants blocks by resident tokens, and frees evicted ones to the pool.

It takes the place of vLLM's manager of full attention, over vLLM's own block pool. A block is a
page of the KV cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from vllm_h2o.errors import IntegrityError
from vllm_h2o.policy import Budget
from vllm_h2o.scheduler.conversations import Conversations, Entry
from vllm_h2o.scheduler.integrity import check_blocks
from vllm_h2o.scheduler.ledger import Ledger
from vllm_h2o.scheduler.other_groups import OtherGroups
from vllm_h2o.scheduler.pressure import pages_to_admit
from vllm_h2o.scheduler.spec import HeavyHitterSpec
from vllm_h2o.scheduler.state import Left, RequestInfo, RequestState
from vllm_h2o.wire import Continuation, RequestPlan

BudgetOf = Callable[[Request], Budget | None]
"""Returns a request's own budget; None: it has the engine's."""


class HeavyHitterManager(FullAttentionManager):
    """Grants blocks by resident length.

    ``allocate_slots`` calls, for each request of a step::

        get_num_blocks_to_allocate   once or twice; the blocks may not be granted: previews
        allocate_new_blocks          once, after the pool was found large enough: commits

    The step that computes the last prompt token packs survivors into the first blocks. The blocks
    after them are freed when the next step starts, because steps run in the order of scheduling.
    With ``eviction=chunk`` the next chunk takes the blocks after the survivors again.

    With prefix caching, survivors are copied into blocks of the request's own, which follow the
    prompt's in the row. The prompt's blocks are dropped, and vLLM keeps them cached::

        row of the block table    | shared | of the prompt, published |    the prompt's last step
                                  |  null  |           null           | survivors |       afterwards
    """

    def __init__(self, kv_cache_spec: HeavyHitterSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._ledger: Ledger | None = None
        self._requests: Mapping[str, Request] = {}
        self._budget_of: BudgetOf = lambda _: None
        self._other_groups = OtherGroups()
        self._largest_chunk = 0
        self._max_overshoot = 0
        self._packed: list[str] = []
        self._unwritten: dict[int, str] = {}
        self._reserved = 0
        self._conversations: Conversations | None = None
        self._entries: dict[str, Entry] = {}
        self._continued: dict[str, Continuation] = {}

    def bind(
        self,
        ledger: Ledger,
        requests: Mapping[str, Request],
        budget_of: BudgetOf | None = None,
        largest_chunk: int = 0,
        max_overshoot: int = 0,
        other_groups: OtherGroups | None = None,
        conversations: Conversations | None = None,
    ) -> None:
        """Connect the manager to the scheduler that owns it.

        Args:
            ledger: lengths of all requests.
            requests: vLLM's live requests, by id.
            budget_of: finds a request's own budget; None: all have the ledger's.
            largest_chunk: most tokens of one step.
            max_overshoot: tokens that may be computed after a request's last, and are discarded.
            other_groups: the groups that vLLM manages; None: there are none.
            conversations: caches of finished requests; None: no request continues.

        """
        self._ledger, self._requests = ledger, requests
        self._budget_of = budget_of or self._budget_of
        self._largest_chunk = largest_chunk
        self._max_overshoot = max_overshoot
        self._other_groups = other_groups or OtherGroups()
        self._conversations = conversations

    def reserve(self, num_pages: int) -> None:
        """Keep blocks for running requests, out of reach of requests that this step admits."""
        self._reserved = num_pages

    @property
    def num_reserved(self) -> int:
        """Blocks that :meth:`reserve` keeps, less those that were taken since."""
        return self._reserved

    @property
    def ledger(self) -> Ledger:
        """The ledger that :meth:`bind` was given.

        Raises:
            IntegrityError: when no scheduler has bound one.

        """
        if self._ledger is None:
            raise IntegrityError("HeavyHitterManager is used without HeavyHitterScheduler")
        return self._ledger

    def info_of(self, request: Request) -> RequestInfo:
        """The lengths and limits that a request brings before it holds blocks."""
        max_len = request.num_prompt_tokens + request.max_tokens + self._max_overshoot
        goes_on = self._conversations is not None or request.resumable
        return RequestInfo(
            prompt_len=request.num_tokens,
            max_len=max_len,
            budget=self._budget_of(request),
            turn=entry.turn if (entry := self._entries.get(request.request_id)) else None,
            ends_with_prompt=not (goes_on or request.request_id in self.ledger.resumed)
            and max_len <= request.num_tokens + 1,
        )

    def continue_from(self, request: Request, num_cached: int) -> tuple[int, bool]:
        """Find the cache of an earlier request to continue from, if it has more tokens, or goes on.

        Args:
            request: a request that holds nothing.
            num_cached: tokens that the prefix cache supplies, with nothing evicted.

        Returns:
            The tokens that it begins with, and whether it continues from another request.

        """
        self._entries.pop(request.request_id, None)
        if self._conversations is None:
            return num_cached, False
        info, ledger = self.info_of(request), self.ledger
        entry = self._conversations.find(request, ledger.budget_of(info), num_cached)
        if entry is None:
            return num_cached, False
        needed = ledger.num_pages(self._slots_with_a_chunk(info, entry.turn))
        needed += self._other_groups.num_states
        if needed >= self.block_pool.num_gpu_blocks:  # with eviction=chunk it may be
            return num_cached, False
        self._entries[request.request_id] = entry
        return entry.turn.logical_len, True

    def extend(self, session: Request) -> bool:
        """Go on with the next part of a session's prompt, as with one more chunk.

        Args:
            session: a request whose prompt is longer now.

        Returns:
            False if it has to begin anew: the end of a prompt scored in a way that cannot be
            repeated, its budget has changed, or blocks or positions are short.

        """
        ledger, rules, info = self.ledger, self.ledger.rules, self.info_of(session)
        held = ledger.states.get(session.request_id)
        scores_once = rules.observation_window > 0 or rules.chunk > 0
        if held is None or not rules.packs_chunks or scores_once:
            return False
        if rules.prefix_caching or rules.num_drafts:
            return False
        # It may hold more tokens than survive a chunk of its prompt.
        most = self._slots_with_a_chunk(info, held)
        room = len(self.req_to_blocks[session.request_id]) + self.block_pool.get_num_free_blocks()
        limit = most if rules.position_limit is None else rules.position_limit
        if ledger.num_pages(most) > room or most > limit:
            return False
        num_computed, budget = session.num_computed_tokens, ledger.budget_of(info)
        return held.extend(num_computed, info, budget, ledger.fits(info))

    def prompt_end_of(self, request: Request) -> int:
        """``RequestInfo.prompt_end`` of a request that holds nothing."""
        entry = self._entries.get(request.request_id)
        return entry.turn.prompt_of(request.num_tokens)[1] if entry else request.num_tokens

    def _slots_with_a_chunk(self, info: RequestInfo, held: RequestState | Left) -> int:
        """Most slots of the tokens that a request holds and of its prompt's next chunk."""
        return held.resident_len + min(info.prompt_len - held.logical_len, self._largest_chunk)

    def _most_pages(self, request_id: str, plan: RequestPlan) -> int:
        """Most blocks of a request whose prompt is packed after each chunk; else no limit."""
        if not (plan.packs_chunks and plan.in_prompt):
            return sys.maxsize
        chunk = self.ledger.resumed.get(request_id, self._largest_chunk)
        return self.ledger.num_pages(plan.budget.most_slots(chunk))

    def take_continued(self) -> dict[str, Continuation]:
        """Take the copies with which requests of this step continue earlier ones."""
        continued, self._continued = self._continued, {}
        return continued

    def _preview(
        self, request_id: str, num_computed: int, num_tokens: int
    ) -> tuple[RequestPlan, RequestInfo | None]:
        holds = request_id in self.ledger.states
        info = None if holds else self.info_of(self._requests[request_id])
        return self.ledger.preview(request_id, num_computed, num_tokens, info), info

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
        """Count blocks that a step takes from the pool, cached ones that nobody holds included."""
        going = self.ledger.states.get(request_id)
        if going and going.goes_on(total_computed_tokens, num_tokens):
            return self._pages_to_go_on(request_id, going)
        entry = self._entries.get(request_id)
        if apply_admission_cap and entry and entry.turn.is_split:
            num_tokens = total_computed_tokens + 1  # vLLM asks for all, but they come one by one
        plan, info = self._preview(request_id, total_computed_tokens, num_tokens)
        held = len(self.req_to_blocks.get(request_id, ())) + len(new_computed_blocks)
        needed = self.ledger.num_row_blocks(plan)
        if apply_admission_cap:
            if self.ledger.rules.under_pressure and info is not None and not plan.num_survivors:
                needed = pages_to_admit(info, self.block_size)
            # vLLM asks for the whole prompt, but each chunk may be packed before the next.
            needed = min(needed, self._most_pages(request_id, plan)) + self._reserved
        return max(needed - held, 0) + self._get_num_evictable_blocks(new_computed_blocks)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Take the blocks and commit the plan."""
        held, entry = self.ledger.states.get(request_id), self._entries.get(request_id)
        if held and held.goes_on(held.logical_len, num_tokens):
            return self._go_on(request_id, held)
        begun = held or (entry and entry.turn)
        num_found = len(self.req_to_blocks[request_id]) * self.block_size
        start = begun.logical_len if begun else num_found
        plan, info = self._preview(request_id, start, num_tokens)
        if self._conversations is not None and info is not None:
            missed = self._conversations.is_miss(self._requests[request_id], plan.budget, start)
            self.ledger.stats.continuation_misses += missed
        if entry and self._conversations:
            self._conversations.use(entry)
        num_slots = self.ledger.num_row_blocks(plan) * self.block_size
        new_blocks = super().allocate_new_blocks(request_id, num_slots, num_slots)
        self.ledger.commit(request_id, plan, info)
        state = self.ledger.states[request_id]
        if entry:
            del self._entries[request_id]
            self.ledger.stats.count_copied(entry.place, start)
            num_pages = self.ledger.num_pages(entry.turn.num_slots)
            prompt_len = self._requests[request_id].num_tokens
            self._continued[request_id] = entry.continued(new_blocks[:num_pages], prompt_len)
        row_end = state.first_block_idx + self.ledger.num_pages(state.held_len)
        has_surplus = plan.pack_block_idx > 0 or len(self.req_to_blocks[request_id]) > row_end
        if has_surplus and not state.in_prompt:
            self._packed.append(request_id)
        if self.ledger.rules.under_pressure:
            # An admitted request takes the rest of its prompt, and its next token, later.
            admitted = pages_to_admit(info, self.block_size) if info else 0
            admitted = min(admitted, self._most_pages(request_id, plan))
            self._reserved = max(self._reserved + admitted - len(new_blocks), 0)
        return new_blocks

    def _pages_to_go_on(self, request_id: str, held: RequestState) -> int:
        """Blocks for another token of a request that repeats its last step."""
        if held.resident_len == held.budget.capacity:
            return 0
        needed = held.first_block_idx + self.ledger.num_pages(held.resident_len + 1)
        return max(needed - len(self.req_to_blocks[request_id]), 0)

    def _go_on(self, request_id: str, held: RequestState) -> list[KVCacheBlock]:
        """Take the blocks for another token, and enter it."""
        new_blocks = []
        if num_new := self._pages_to_go_on(request_id, held):
            num_slots = (len(self.req_to_blocks[request_id]) + num_new) * self.block_size
            new_blocks = super().allocate_new_blocks(request_id, num_slots, num_slots)
            self._reserved = max(self._reserved - num_new, 0)
        self.ledger.go_on(request_id)
        return new_blocks

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Publish a prompt's full blocks, which are never rewritten, but not those of survivors."""
        self.publish(self, super().cache_blocks, request, num_tokens, *args, **kwargs)

    def publish(
        self,
        owner: SingleTypeKVCacheManager,
        cache_blocks: Callable[..., None],
        request: Request,
        num_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Publish a group's blocks up to the token at which the policy's layers begin to evict."""
        request_id = request.request_id
        end = self.ledger.states[request_id].num_sharable(num_tokens)
        if self._conversations and not self._conversations.weights.is_current(request_id):
            end = 0  # its later blocks are computed with other weights than its first
        before = owner.num_cached_block.get(request_id, 0)
        cache_blocks(request, end, *args, **kwargs)
        after = owner.num_cached_block.get(request_id, 0)
        blocks = owner.req_to_blocks[request_id][before:after]
        self._unwritten.update((block.block_id, request_id) for block in blocks)

    def num_written(self, blocks: Sequence[KVCacheBlock]) -> int:
        """How many of the first cached blocks are written. Do not reuse the others in this step.

        vLLM publishes blocks when their step is scheduled. Its own kernels write all tokens of a
        step before any of them attends; the policy's write and attend request by request.
        """
        ids = (block.block_id for block in blocks)
        return next((n for n, i in enumerate(ids) if i in self._unwritten), len(blocks))

    def new_step_starts(self) -> None:
        """Free the blocks around the survivors that the last step packed."""
        for request_id in self._packed:
            state = self.ledger.states.get(request_id)
            if state is None:
                continue
            blocks, start = self.req_to_blocks[request_id], state.first_block_idx
            end = start + self.ledger.num_pages(state.held_len)
            freed = blocks[:start] + blocks[end:]
            self.ledger.stats.pages_freed_early += len(freed)
            self.block_pool.free_blocks(reversed(freed))
            # Rows of the workers keep their order: dropped blocks in front become null blocks.
            blocks[:] = [self._null_block] * start + blocks[start:end]
        self._packed.clear()
        self._unwritten.clear()

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Hand out the request's blocks for freeing, and forget its lengths.

        Blocks that it published for a step that it is preempted from are never computed.
        """
        if self.ledger.is_scheduled(request_id):
            published = {i for i, owner in self._unwritten.items() if owner == request_id}
            self.block_pool.evict_blocks(published)
            for block_id in published:
                del self._unwritten[block_id]
        self._entries.pop(request_id, None)
        self._continued.pop(request_id, None)
        if self._conversations:
            self._conversations.weights.end(request_id)
        self.ledger.close(request_id)
        return super().pop_blocks_for_free(request_id)

    def num_held(self) -> int:
        """Blocks that requests hold; a shared block counts for each of them."""
        rows = sum(map(len, self.req_to_blocks.values()))
        held = self.ledger.states.items()
        # Requests that the last step packed have not dropped theirs yet.
        return rows - sum(r.first_block_idx for i, r in held if i not in self._packed)

    def check_integrity(self) -> None:
        """Count every block and every length.

        Raises:
            IntegrityError: with all numbers, when a block is lost, held twice, or has no owner.

        """
        rows = {request_id: blocks for request_id, blocks in self.req_to_blocks.items() if blocks}
        check_blocks(self.block_pool, rows, self.ledger, self._packed, self._other_groups)
        if self._conversations is not None:
            self._conversations.check_integrity()


def register_manager() -> None:
    """Register the block manager of :class:`HeavyHitterSpec` with vLLM."""
    # The registry fills itself with vLLM's own specs only while it is empty.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(HeavyHitterSpec, HeavyHitterManager, FullAttentionSpec)


register_manager()
