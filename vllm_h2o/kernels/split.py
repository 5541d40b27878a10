# SPDX-License-Identifier: Apache-2.0
"""The definition where KV heads share slots, of a layer or of all; see reference.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_h2o.kernels.cache import SHARED_TENTHS
from vllm_h2o.kernels.reference import Head, candidates
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.policy import Budget


def split_capacity(
    strips: Sequence[Strip],
    logical_len: int,
    budget: Budget,
    page_size: int,
    by_age: bool = False,
    shared_tenths: int = SHARED_TENTHS,
) -> list[int]:
    """Slots of each of H KV heads from a prompt's end on; H * capacity in all.

    Not of the paper. Heads differ in how many tokens they need: the best H * heavy of all heads
    compete. Of the slots for heavy hitters a head gets some tenths by how many of its own are among
    the best (of equals, those of lower heads), and the rest as if heads were equal. Sinks and
    recent tokens are as many in every head. A head has whole pages, one heavy hitter at least, and
    no more slots than tokens and one; pages that rounding leaves go to the heads that lost most.

    Args:
        strips: what the heads hold, each as much.
        logical_len: tokens computed so far.
        budget: of a head on average; its sinks and recent tokens stay in any case.
        page_size: slots of a page.
        by_age: whether scores are ranked as means.
        shared_tenths: of the slots for heavy hitters, by how many are among the best.

    """
    num_heads, num_heavy, capacity = len(strips), budget.num_heavy, budget.capacity
    competing = [
        (-float(rank), head)
        for head, strip in enumerate(strips)
        for rank in strip.ranks(logical_len, by_age)[candidates(strip, logical_len, budget)]
    ]
    best = [head for _, head in sorted(competing)[: num_heads * num_heavy]]
    equal = 10 * capacity - shared_tenths * num_heavy
    tenths = [equal + shared_tenths * best.count(head) for head in range(num_heads)]
    least = -(-(capacity - num_heavy + min(num_heavy, 1)) // page_size)
    most = (len(strips[0]) + 1) // page_size
    pages = [max(wanted // (10 * page_size), least) for wanted in tenths]

    def missing(head: int) -> int:
        return tenths[head] - pages[head] * 10 * page_size

    while sum(pages) < num_heads * capacity // page_size:
        pages[max((h for h in range(num_heads) if pages[h] < most), key=missing)] += 1
    while sum(pages) > num_heads * capacity // page_size:
        pages[min((h for h in range(num_heads) if pages[h] > least), key=missing)] -= 1
    return [num * page_size for num in pages]


def pack_layer(heads: Sequence[Head], page_size: int, shared_tenths: int = SHARED_TENTHS) -> None:
    """At a prompt's end, KV heads of a layer, or of all, share slots, and keep their survivors."""
    one, strips = heads[0], [head.strip for head in heads]
    how = (page_size, one.ranking.by_age, shared_tenths)
    capacities = split_capacity(strips, one.logical_len, one.budget, *how)
    for head, capacity in zip(heads, capacities, strict=True):
        num_heavy = head.budget.num_heavy + capacity - head.budget.capacity
        head.budget = replace(head.budget, capacity=capacity, num_heavy=num_heavy)
        head.pack()
