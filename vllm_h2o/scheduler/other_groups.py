# SPDX-License-Identifier: Apache-2.0
"""Layers of other kinds next to the policy's: vLLM manages their blocks, in the same pool.

vLLM puts layers of one kind into groups of one size; a request has a row of blocks in each group.
One group is the policy's. In a group of sliding windows a row grows by position, and blocks behind
the window are null. In a group of state-space layers a row is one block, which holds the state::

    the policy's group     | survivors |                      pages follow resident tokens
    a window's group       | null | null | null | window |    pages follow positions
    a group of states      | state |                          one page a request
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec, SlidingWindowSpec

from vllm_h2o.errors import UnsupportedError
from vllm_h2o.options.refusals import ONE_GROUP
from vllm_h2o.options.remedies import ANOTHER_MODEL
from vllm_h2o.pages import num_pages
from vllm_h2o.scheduler.spec import HeavyHitterSpec
from vllm_h2o.scheduler.state import RequestInfo, RequestState

Manager: TypeAlias = SlidingWindowManager | MambaManager
"""vLLM's manager of a group of another kind."""


@dataclass(frozen=True)
class OtherGroups:
    """The blocks of all groups but the policy's; there may be none.

    Args:
        managers: vLLM's managers, one for each group.

    """

    managers: Sequence[Manager] = ()

    @property
    def windows(self) -> list[int]:
        """Tokens of the window of each group that slides."""
        return [m.sliding_window for m in self.managers if isinstance(m, SlidingWindowManager)]

    @property
    def num_states(self) -> int:
        """Groups of state-space layers."""
        return len(self.managers) - len(self.windows)

    def states_of(self, request_id: str) -> list[list[KVCacheBlock]]:
        """The blocks of a request in each group of state-space layers: one, if it has begun."""
        managers = (m for m in self.managers if isinstance(m, MambaManager))
        return [manager.req_to_blocks[request_id] for manager in managers]

    def rows(self) -> Iterator[list[KVCacheBlock]]:
        """The blocks of each request in each group."""
        for manager in self.managers:
            yield from manager.req_to_blocks.values()

    def private_rows(self) -> Iterator[list[KVCacheBlock]]:
        """Blocks that only one request may hold: all that vLLM has not published."""
        for row in self.rows():
            yield [block for block in row if block.block_hash is None and not block.is_null]

    def num_held(self) -> int:
        """Blocks that requests hold; a shared block counts for each of them."""
        return sum(map(_held, self.rows()))

    def num_taken(self, states: Mapping[str, RequestState]) -> int:
        """Most blocks that running requests take for two tokens, or for the rest of the prompt.

        Blocks behind the windows, which are freed some steps later, are not subtracted.
        """
        return sum(
            self._taken(manager, request_id, state)
            for manager in self.managers
            for request_id, state in states.items()
        )

    def num_to_admit(self, info: RequestInfo) -> int:
        """Blocks without which vLLM does not admit a request."""
        return sum(
            min(num_pages(info.prompt_len + 1, manager.block_size), _most(manager))
            for manager in self.managers
        )

    def misfits(self, states: Mapping[str, RequestState]) -> list[tuple[int, str, int]]:
        """(group, request, blocks of its row) of rows that do not fit their tokens."""
        lengths = {request_id: state.logical_len for request_id, state in states.items()}
        return [
            (manager.kv_cache_group_id, request_id, len(row))
            for manager in self.managers
            for request_id in lengths.keys() | manager.req_to_blocks.keys()
            if len(row := manager.req_to_blocks.get(request_id, []))
            != num_pages(lengths.get(request_id, 0), manager.block_size)
        ]

    def _taken(self, manager: Manager, request_id: str, state: RequestState) -> int:
        end = (state.prompt_end if state.in_prompt else state.logical_len + 1) + 1
        end = end if state.max_len is None else min(end, state.max_len)
        row = manager.req_to_blocks.get(request_id, [])
        taken = max(num_pages(end, manager.block_size) - len(row), 0)
        is_bounded = state.in_prompt or isinstance(manager, MambaManager)
        return min(taken, max(_most(manager) - _held(row), 0)) if is_bounded else taken


def _held(row: Sequence[KVCacheBlock]) -> int:
    """Blocks of a row. They follow the null blocks: few, however long the row."""
    return sum(1 for _ in takewhile(lambda block: not block.is_null, reversed(row)))


def _most(manager: Manager) -> int:
    """Most blocks of one request, among them the blocks of a chunk of its prompt."""
    if isinstance(manager, MambaManager):
        return 1
    most = manager.max_admission_blocks_per_request
    assert most is not None
    return most


def policy_group(kv_cache_config: KVCacheConfig, alone: bool = False) -> int:
    """Index of the one group whose blocks the policy manages.

    Args:
        kv_cache_config: vLLM's groups.
        alone: whether an option rules out groups that slide.

    Raises:
        UnsupportedError: when there is no such group or more than one, or when another group has
            neither states nor a sliding window, or has pages of another shape.

    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    own = [(index, spec) for index, spec in enumerate(specs) if isinstance(spec, HeavyHitterSpec)]
    kinds = ", ".join(type(spec).__name__ for spec in specs) or "none"
    if len(own) != 1:
        raise _unsupported(f"its layers keep these caches: {kinds}", ONE_GROUP)
    ((index, spec),) = own
    others = [other for other in specs if other is not spec]
    windows = [other for other in others if type(other) is SlidingWindowSpec]
    if windows and alone:
        raise _unsupported(
            "it has sliding windows that its configuration does not name",
            "prefix caching (before vLLM 0.33), speculative decoding, continuation, rolling "
            "positions, score=reconstruction and split=layers need layers that do not slide",
            "leave --enable-prefix-caching, --speculative-config and these options out",
        )
    if not all(type(other) in (SlidingWindowSpec, MambaSpec) for other in others):
        raise _unsupported(
            f"its layers keep these caches: {kinds}",
            "next to full attention the policy supports sliding windows and states only",
        )
    shapes = [(spec.block_size, spec.stock_page_size_bytes), *_shapes(windows)]
    if len(set(shapes)) != 1:
        raise _unsupported(
            f"its layers have pages of {', '.join(f'{b} bytes in {n} slots' for n, b in shapes)}",
            "layers with attention share one pool, whose pages have one shape",
            "give a --block-size that both kinds support, or run this model without --kv-policy",
        )
    return index


def _shapes(specs: Iterable[object]) -> Iterator[tuple[int, int]]:
    """(slots, bytes of K and V) of a page of each."""
    for spec in specs:
        assert isinstance(spec, SlidingWindowSpec)
        yield spec.block_size, spec.unpadded_page_size_bytes


def _unsupported(found: str, why: str, remedy: str = ANOTHER_MODEL) -> UnsupportedError:
    return UnsupportedError("a kv-policy for this model", found, why, remedy)
