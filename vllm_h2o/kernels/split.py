"""The truth, where KV heads share slots, of a layer or of all; see reference.py."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_h2o.kernels.cache import SHARED_TENTHS
from vllm_h2o.kernels.reference import Head
from vllm_h2o.kernels.strip import Strip


def split_capacity(
    strips: Sequence[Strip],
    logical_len: int,
    capacity: int,
    num_recent: int,
    num_sinks: int,
    page_size: int,
    by_age: bool = False,
    shared_tenths: int = SHARED_TENTHS,
) -> list[int]:
    """Slots of each of H KV heads from a prompt's end on; H * capacity in all.

    Not of the paper. Heads differ in how many tokens they need: the best H * heavy of all heads
    compete. Of the slots for heavy hitters a head gets some tenths by how many of its own are among
    the best (of equals, those of lower heads), and the rest as if heads were equal. Sinks and
    recent tokens are as many in every head. A head has whole pages, one heavy hitter at least, and
    no more slots than tokens and one; what rounding leaves goes to where most was cut off.

    Args:
        strips: what the heads hold, each as much.
        logical_len: tokens computed so far.
        capacity: slots of a head on average, whole pages.
        num_recent: most recent positions that stay in any case.
        num_sinks: first positions that stay in any case.
        page_size: slots of a page.
        by_age: compare means over the queries since a token was stored.
        shared_tenths: of the slots for heavy hitters, by how many are among the best.

    """
    num_heads, num_heavy = len(strips), capacity - 1 - num_sinks - num_recent
    candidates = [
        (-rank, head)
        for head, strip in enumerate(strips)
        for rank, position in zip(
            strip.ranks(logical_len, by_age).tolist(), strip.position.tolist(), strict=True
        )
        if num_sinks <= position < logical_len - num_recent
    ]
    best = [head for _, head in sorted(candidates)[: num_heads * num_heavy]]
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
    for head in heads:
        head.extend_scores()
    one, strips = heads[0], [head.strip for head in heads]
    budget = (one.capacity, one.num_recent, one.num_sinks)
    how = (page_size, one.by_age, shared_tenths)
    capacities = split_capacity(strips, one.logical_len, *budget, *how)
    for head, capacity in zip(heads, capacities, strict=True):
        head.capacity = capacity
        head.pack()
