# SPDX-License-Identifier: Apache-2.0
"""The cache of one request that has ended: conversations.py has the book of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_h2o.scheduler.kept import Kept
from vllm_h2o.scheduler.prefixes import Name
from vllm_h2o.scheduler.state import Left
from vllm_h2o.scheduler.weights import Identity
from vllm_h2o.wire import Continuation


@dataclass(frozen=True, eq=False)
class Entry:
    """The cache of one finished request.

    Args:
        turn: its lengths.
        blocks: its blocks, in order; none where it is elsewhere.
        name: of its tokens.
        weights: that computed it.
        place: of its copy, in host memory or in files (wire.Saved), or names of the files that are
            open for a step (wire.Continuation); None: it is in blocks.
        kept: what its files say when memory drops it; None: then it is forgotten.

    """

    turn: Left
    blocks: tuple[KVCacheBlock, ...]
    name: Name
    weights: Identity
    place: int | str | tuple[str, ...] | None = None
    kept: Kept | None = None

    @property
    def source(self) -> tuple[int, ...]:
        """Ids of its blocks."""
        return tuple(block.block_id for block in self.blocks)

    def continued(self, blocks: Sequence[KVCacheBlock], prompt_len: int) -> Continuation:
        """The copy that the workers make.

        Args:
            blocks: first blocks of the request that continues, as many as the slots need.
            prompt_len: of the request that continues.

        """
        assert not isinstance(self.place, str), "files are opened before they are read"
        ids, turn = tuple(block.block_id for block in blocks), self.turn
        goes_on = turn.is_followed_by(prompt_len)
        restored_end = 0 if goes_on else turn.restored_end
        keeps_slots = goes_on or turn.is_split
        return Continuation(self.source, ids, turn.num_slots, restored_end, keeps_slots, self.place)
