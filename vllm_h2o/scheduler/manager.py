"""Pages of a request: as many as its resident tokens need; the prompt's tail goes back."""

from __future__ import annotations

from collections import Counter
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
from vllm_h2o.scheduler.ledger import Ledger
from vllm_h2o.scheduler.pressure import pages_to_admit
from vllm_h2o.scheduler.spec import HeavyHitterSpec
from vllm_h2o.scheduler.state import Left, RequestInfo, RequestState
from vllm_h2o.scheduler.windows import Windows
from vllm_h2o.wire import Continuation, RequestPlan

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
    after them are freed when the next step starts, because steps run in the order of scheduling.
    Where every chunk packs, the next chunk takes the pages after the survivors again.

    With prefix caching, survivors are copied into pages of the request's own, which follow the
    prompt's in the row; those of the prompt are dropped, and stay what vLLM caches::

        row of the block table    | shared | of the prompt, published |    the prompt's last step
                                  |  null  |           null           | survivors |       afterwards
    """

    def __init__(self, kv_cache_spec: HeavyHitterSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._ledger: Ledger | None = None
        self._requests: Mapping[str, Request] = {}
        self._budget_of: BudgetOf = _no_budget_of_its_own
        self._windows = Windows()
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
        windows: Windows | None = None,
        conversations: Conversations | None = None,
    ) -> None:
        """Give the manager what it counts with.

        Args:
            ledger: the lengths.
            requests: vLLM's live requests, by id.
            budget_of: a request's own budget; None where all have the ledger's.
            largest_chunk: most tokens of one step.
            max_overshoot: tokens that may be computed after a request's last, and are thrown away.
            windows: the groups of layers with a sliding window; None where there are none.
            conversations: what requests leave; None where nobody continues.

        """
        self._ledger, self._requests = ledger, requests
        self._budget_of = budget_of or _no_budget_of_its_own
        self._largest_chunk = largest_chunk
        self._max_overshoot = max_overshoot
        self._windows = windows or Windows()
        self._conversations = conversations

    def reserve(self, num_pages: int) -> None:
        """Keep pages that running requests will take from those that this step admits."""
        self._reserved = num_pages

    @property
    def ledger(self) -> Ledger:
        """The ledger.

        Raises:
            IntegrityError: when no scheduler has bound one.

        """
        if self._ledger is None:
            raise IntegrityError("HeavyHitterManager is used without HeavyHitterScheduler")
        return self._ledger

    def info_of(self, request: Request) -> RequestInfo:
        """What a request brings, as long as it holds nothing."""
        params = request.sampling_params
        return RequestInfo(
            prompt_len=request.num_tokens,
            max_len=request.num_prompt_tokens + request.max_tokens + self._max_overshoot,
            seed=params.seed if params else None,
            budget=self._budget_of(request),
            turn=entry.turn if (entry := self._entries.get(request.request_id)) else None,
        )

    def continue_from(self, request: Request, num_cached: int) -> int:
        """Look for what a request continues from, if it has more than it finds in other caches.

        Args:
            request: one that holds nothing.
            num_cached: tokens that it finds as they were computed, with nothing evicted.

        Returns:
            The tokens that it begins with; ``num_cached`` where it continues from nothing.

        """
        self._entries.pop(request.request_id, None)
        if self._conversations is None:
            return num_cached
        info, ledger = self.info_of(request), self.ledger
        entry = self._conversations.find(request, ledger.budget_of(info), ledger.seed_of(info))
        if entry is None or entry.turn.logical_len <= num_cached:
            return num_cached
        needed = ledger.num_pages(self._slots_with_a_chunk(info, entry.turn))
        if needed >= self.block_pool.num_gpu_blocks:  # with chunks that are packed, as it may be
            return num_cached
        self._entries[request.request_id] = entry
        return entry.turn.logical_len

    def extend(self, session: Request) -> bool:
        """Go on with a session's next part after what it holds, as with one more chunk.

        Args:
            session: a request whose prompt is longer now.

        Returns:
            Whether it does. Not where a prompt's end has done what is not done again, where what is
            held was chosen for another budget, or where there are no pages or positions for it.

        """
        ledger, info = self.ledger, self.info_of(session)
        held = ledger.states.get(session.request_id)
        scores_once = not ledger.observation_window and not ledger.second_pass_chunk
        alone = not ledger.prefix_caching and not ledger.num_drafts and ledger.victim_size == 1
        if held is None or not (ledger.packs_chunks and scores_once and alone):
            return False
        # What it holds may be more than what a chunk of its prompt has left.
        most = self._slots_with_a_chunk(info, held)
        room = len(self.req_to_blocks[session.request_id]) + self.block_pool.get_num_free_blocks()
        limit = most if ledger.position_limit is None else ledger.position_limit
        if ledger.num_pages(most) > room or most > limit:
            return False
        num_computed, budget = session.num_computed_tokens, ledger.budget_of(info)
        return held.extend(num_computed, info, budget, ledger.fits(info))

    def _slots_with_a_chunk(self, info: RequestInfo, held: RequestState | Left) -> int:
        """Slots of what a request holds, and of the next chunk of its prompt, at the most."""
        return held.resident_len + min(info.prompt_len - held.logical_len, self._largest_chunk)

    def take_continued(self) -> dict[str, Continuation]:
        """Requests of the step that is being scheduled that begin with the cache of another."""
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
        """Pages that computing tokens [total_computed_tokens, num_tokens) takes from the pool.

        Those that are found computed and that nobody holds are taken from it, too.
        """
        going = self.ledger.states.get(request_id)
        if going and going.goes_on(total_computed_tokens, num_tokens):
            return self._pages_to_go_on(request_id, going)
        plan, info = self._preview(request_id, total_computed_tokens, num_tokens)
        held = len(self.req_to_blocks.get(request_id, ())) + len(new_computed_blocks)
        needed = self.ledger.num_row_blocks(plan)
        if apply_admission_cap and self.ledger.packs_chunks and plan.in_prompt:
            # The whole prompt at once, which never comes: each chunk leaves C - 1 tokens.
            most = max(plan.kept + self._largest_chunk, plan.capacity)
            needed = min(needed, self.ledger.num_pages(most))
        if apply_admission_cap and self.ledger.under_pressure:
            if info is not None and not plan.num_survivors:
                needed = pages_to_admit(info, self.block_size)
            needed += self._reserved
        return max(needed - held, 0) + self._get_num_evictable_blocks(new_computed_blocks)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Take the pages and commit the plan."""
        held, entry = self.ledger.states.get(request_id), self._entries.get(request_id)
        if held and held.goes_on(held.logical_len, num_tokens):
            return self._go_on(request_id, held)
        begun = held or (entry and entry.turn)
        num_found = len(self.req_to_blocks[request_id]) * self.block_size
        start = begun.logical_len if begun else num_found
        plan, info = self._preview(request_id, start, num_tokens)
        num_slots = self.ledger.num_row_blocks(plan) * self.block_size
        new_blocks = super().allocate_new_blocks(request_id, num_slots, num_slots)
        self.ledger.commit(request_id, plan, info)
        state = self.ledger.states[request_id]
        if entry:
            del self._entries[request_id]
            self._continued[request_id] = entry.continued(new_blocks)
        if plan.num_survivors and not state.in_prompt and not plan.evicts_together:
            self._packed.append(request_id)
        if self.ledger.under_pressure:
            # Who is admitted takes the rest of its prompt later, and its next token.
            admitted = pages_to_admit(info, self.block_size) if info else 0
            self._reserved = max(self._reserved + admitted - len(new_blocks), 0)
        return new_blocks

    def _pages_to_go_on(self, request_id: str, held: RequestState) -> int:
        """Pages of another token of a request that goes on."""
        if held.resident_len == held.budget.capacity:
            return 0
        needed = held.first_block_idx + self.ledger.num_pages(held.resident_len + 1)
        return max(needed - len(self.req_to_blocks[request_id]), 0)

    def _go_on(self, request_id: str, held: RequestState) -> list[KVCacheBlock]:
        """Take them."""
        new_blocks = []
        if num_new := self._pages_to_go_on(request_id, held):
            num_slots = (len(self.req_to_blocks[request_id]) + num_new) * self.block_size
            new_blocks = super().allocate_new_blocks(request_id, num_slots, num_slots)
            self._reserved = max(self._reserved - num_new, 0)
        self.ledger.go_on(request_id)
        return new_blocks

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Publish a prompt's full pages, which nobody rewrites; never those of survivors."""
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
        """Publish a group's pages up to where all layers begin to compute from what is left."""
        request_id = request.request_id
        end = self.ledger.states[request_id].num_sharable(num_tokens)
        before = owner.num_cached_block.get(request_id, 0)
        cache_blocks(request, end, *args, **kwargs)
        after = owner.num_cached_block.get(request_id, 0)
        blocks = owner.req_to_blocks[request_id][before:after]
        self._unwritten.update((block.block_id, request_id) for block in blocks)

    def num_written(self, blocks: Sequence[KVCacheBlock]) -> int:
        """How many of the pages that a request finds, from the first, were computed before now.

        vLLM publishes pages when their step is scheduled. Its own kernels write all tokens of a
        step before any of them attends; the policy's write each request's as its turn comes.
        """
        ids = (block.block_id for block in blocks)
        return next((n for n, i in enumerate(ids) if i in self._unwritten), len(blocks))

    def new_step_starts(self) -> None:
        """Free the pages around the survivors that the last step packed."""
        for request_id in self._packed:
            state = self.ledger.states.get(request_id)
            if state is None:
                continue
            blocks, start = self.req_to_blocks[request_id], state.first_block_idx
            end = start + self.ledger.num_pages(state.held_len)
            freed = blocks[:start] + blocks[end:]
            self.ledger.stats.pages_freed_early += len(freed)
            self.block_pool.free_blocks(reversed(freed))
            # The row in the workers keeps its order: what was dropped in front leaves its place.
            blocks[:] = [self._null_block] * start + blocks[start:end]
        self._packed.clear()
        self._unwritten.clear()

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Hand out the request's pages for freeing, and forget its lengths.

        What it published for a step that it is preempted from will not be computed.
        """
        if self.ledger.is_scheduled(request_id):
            published = {i for i, owner in self._unwritten.items() if owner == request_id}
            self.block_pool.evict_blocks(published)
            for block_id in published:
                del self._unwritten[block_id]
        self._remember(request_id)
        self._entries.pop(request_id, None)
        self._continued.pop(request_id, None)
        self.ledger.close(request_id)
        return super().pop_blocks_for_free(request_id)

    def _remember(self, request_id: str) -> None:
        """Leave what a request holds that ends past its prompt to who continues it."""
        state = self.ledger.states.get(request_id)
        if self._conversations is None or state is None or state.in_prompt:
            return
        turn = state.left(self.ledger.victim_size, self.ledger.window_lifetime)
        start, num_pages = state.first_block_idx, self.ledger.num_pages(turn.num_slots)
        blocks = self.req_to_blocks[request_id][start : start + num_pages]
        self._conversations.add(self._requests[request_id], state, turn, blocks)

    def num_held(self) -> int:
        """Pages that requests hold; a shared one counts for each of them."""
        rows = sum(map(len, self.req_to_blocks.values()))
        held = self.ledger.states.items()
        # Those that the last step packed have not dropped theirs yet.
        return rows - sum(r.first_block_idx for i, r in held if i not in self._packed)

    def check_integrity(self) -> None:
        """Count every page and every length.

        Raises:
            IntegrityError: with all numbers, when a page is lost, held twice, or belongs to nobody.

        """
        null = self.block_pool.null_block
        rows = {request_id: blocks for request_id, blocks in self.req_to_blocks.items() if blocks}
        every_row = [*rows.values(), *self._windows.rows()]
        held = Counter(b.block_id for blocks in every_row for b in blocks if b is not null)
        num_free = self.block_pool.get_num_free_blocks()
        total = self.block_pool.num_gpu_blocks - 1  # the null block is nobody's
        wrong_refs = [i for i, n in held.items() if self.block_pool.blocks[i].ref_cnt != n]
        owned = [*map(self._private, rows), *self._windows.private_rows()]
        private = [b.block_id for blocks in owned for b in blocks if held[b.block_id] > 1]
        misfits = {
            request_id: (len(blocks), blocks.count(null), state)
            for request_id, blocks in rows.items()
            if (state := self.ledger.states.get(request_id)) is not None
            and request_id not in self._packed
            and (len(blocks) - state.first_block_idx, blocks.count(null))
            != (self.ledger.num_pages(state.held_len), state.first_block_idx)
        }
        strangers = rows.keys() ^ self.ledger.states.keys()
        off_windows = self._windows.misfits(self.ledger.states)
        wrong = wrong_refs or private or strangers or misfits or off_windows
        if num_free + len(held) != total or wrong:
            raise IntegrityError(
                f"pages: {num_free} free + {len(held)} held of {total}; reference count not that "
                f"of the holders: {wrong_refs}; shared, though one rewrites them: {private}; "
                f"owners without lengths or lengths without owners: {strangers}; (pages, dropped, "
                f"lengths) that do not fit: {misfits}; (group, request, blocks) of sliding windows "
                f"that do not fit: {off_windows}"
            )
        if self._conversations is not None:
            self._conversations.check_integrity()

    def _private(self, request_id: str) -> list[KVCacheBlock]:
        """Pages that a request writes to, or has published nothing of."""
        state = self.ledger.states.get(request_id)
        if state is None or request_id in self._packed:
            return []
        blocks = self.req_to_blocks[request_id][state.first_block_idx :]
        if not self.ledger.prefix_caching or (state.first_block_idx and not state.in_prompt):
            return blocks
        return blocks[state.num_sharable(len(blocks) * self.block_size) // self.block_size :]


def register_manager() -> None:
    """Tell vLLM's registry which manager keeps the pages of :class:`HeavyHitterSpec`."""
    # The registry fills itself with vLLM's own specs only while it is empty.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(HeavyHitterSpec, HeavyHitterManager, FullAttentionSpec)


register_manager()
