# SPDX-License-Identifier: Apache-2.0
"""Counts every block and every length: each block is free, cached, or held by its owners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_h2o.errors import IntegrityError
from vllm_h2o.scheduler.ledger import Ledger
from vllm_h2o.scheduler.other_groups import OtherGroups

Row = Sequence[KVCacheBlock]


def check_blocks(
    pool: BlockPool,
    rows: Mapping[str, Row],
    ledger: Ledger,
    packed: Collection[str],
    other_groups: OtherGroups,
) -> None:
    """Compare the blocks of the pool with the lengths of the ledger.

    Args:
        pool: vLLM's pool of blocks.
        rows: blocks of each request that holds any, in the policy's group.
        ledger: lengths of all requests.
        packed: requests that the last step packed, and that have not dropped blocks yet.
        other_groups: the groups that vLLM manages.

    Raises:
        IntegrityError: with all numbers, when a block is lost, held twice, or has no owner.

    """
    null = pool.null_block
    held = Counter(
        block.block_id
        for blocks in (*rows.values(), *other_groups.rows())
        for block in blocks
        if block is not null
    )
    num_free = pool.get_num_free_blocks()
    total = pool.num_gpu_blocks - 1  # the null block has no owner
    wrong_refs = [i for i, n in held.items() if pool.blocks[i].ref_cnt != n]
    own = [_private(i, row, ledger) for i, row in rows.items() if i not in packed]
    own.extend(other_groups.private_rows())
    private = [b.block_id for blocks in own for b in blocks if held[b.block_id] > 1]
    misfits = {
        request_id: (len(row), row.count(null), state)
        for request_id, row in rows.items()
        if (state := ledger.states.get(request_id)) is not None
        and request_id not in packed
        and (len(row) - state.first_block_idx, row.count(null))
        != (ledger.num_pages(state.held_len), state.first_block_idx)
    }
    strangers = rows.keys() ^ ledger.states.keys()
    others = other_groups.misfits(ledger.states)
    wrong = wrong_refs or private or strangers or misfits or others
    if num_free + len(held) != total or wrong:
        raise IntegrityError(
            f"blocks: {num_free} free + {len(held)} held of {total}; wrong reference counts: "
            f"{wrong_refs}; shared, but written by a holder: {private}; owners without lengths or "
            f"lengths without owners: {strangers}; (blocks, dropped, lengths) that do not fit: "
            f"{misfits}; (group, request, blocks) of other groups that do not fit: {others}"
        )


def _private(request_id: str, row: Row, ledger: Ledger) -> Row:
    """Blocks that a request writes to, or has not published."""
    state = ledger.states.get(request_id)
    if state is None:
        return []
    blocks = row[state.first_block_idx :]
    if not ledger.rules.prefix_caching or (state.first_block_idx and not state.in_prompt):
        return blocks
    return blocks[state.num_sharable(len(blocks) * ledger.block_size) // ledger.block_size :]
