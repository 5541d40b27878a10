# SPDX-License-Identifier: Apache-2.0
"""Preempted requests need what they had: no torch, no vLLM.

Past its budget a request held its budget. If its whole length had to have room at once, it would
wait for many times the pages that it gave back, and every request behind it with it. So where its
whole length has no room, its prompt is evicted from after each chunk, as with ``eviction=chunk``::

    whole length has room    -> computed again like a new prompt
    budget and chunk have    -> computed again in chunks of that size
    neither                  -> waits
"""

from __future__ import annotations

from dataclasses import replace

from vllm_h2o.pages import num_pages
from vllm_h2o.scheduler.ledger import Ledger
from vllm_h2o.scheduler.state import RequestInfo


def fewest_pages(ledger: Ledger, info: RequestInfo) -> int | None:
    """Fewest pages in which a request is computed again; None: only its whole length will do.

    Args:
        ledger: the engine's rules.
        info: what the request brings, with the tokens that it had generated.

    """
    if ledger.fits(replace(info, ends_with_prompt=False)):
        return None
    pages = num_pages(_most_held(ledger, info) + _least(ledger), ledger.block_size)
    return pages if pages < num_pages(info.prompt_len, ledger.block_size) else None


def chunk_in(ledger: Ledger, info: RequestInfo, whole: int, free: int) -> int:
    """Most tokens of a chunk of a request that is computed again; 0: it is not cut into such.

    A chunk takes what is free besides the budget, at least a page and at most another budget: if
    the request is preempted once more, little is lost.

    Args:
        ledger: the engine's rules.
        info: what the request brings, with the tokens that it had generated.
        whole: pages that it takes otherwise.
        free: pages that it may take; if they are too few for a chunk, it waits.

    """
    fewest = fewest_pages(ledger, info)
    if fewest is None or whole <= max(free, fewest):
        return 0
    budget, least = ledger.budget_of(info), _least(ledger)
    room = free * ledger.block_size - _most_held(ledger, info)
    return min(max(room, least), max(budget.capacity, least))


def _most_held(ledger: Ledger, info: RequestInfo) -> int:
    """Most slots between two chunks."""
    held = ledger.budget_of(info).most_slots(0)
    return max(held, info.turn.resident_len) if info.turn else held


def _least(ledger: Ledger) -> int:
    """Fewest tokens of a chunk: a page, and the observation window, which is computed whole."""
    return max(ledger.block_size, ledger.rules.observation_window)
