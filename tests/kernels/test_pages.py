# SPDX-License-Identifier: Apache-2.0
"""Whole pages that are evicted: the reference, by hand and as a mask."""

from __future__ import annotations

import pytest

from tests.kernels.one_head import Inputs, causal, head, run, same, strip
from vllm_h2o.kernels.reference import pack_survivors
from vllm_h2o.policy import Budget


@pytest.mark.parametrize(
    ("scores", "pages", "num_recent", "num_sinks", "survivors"),
    [
        # Sums of pages of two: 6, 6, 3, 1. Single tokens would keep 0, 1, 3, 4.
        ([1, 5, 0, 6, 3, 0, 1, 0], 2, 0, 0, [0, 1, 2, 3]),
        ([0, 0, 5, 6, 1, 2, 9, 9], 3, 1, 1, [0, 1, 2, 3, 6, 7]),  # a sink and a recent token
        ([1, 1, 1, 1, 1, 1, 1, 1], 2, 0, 0, [0, 1, 2, 3]),  # of equal sums the newest go
        ([0, 0, 0, 2, 9, 9, 9, 9, 0], 1, 0, 0, [4, 5, 8]),  # the last page is not full
        ([9, 9, 0, 0, 5, 5, 0, 0, 0], 2, 3, 0, [0, 1, 6, 7, 8]),  # recent tokens 6, 7 and 8
        ([9, 9, 0, 0, 5], 2, 0, 0, [0, 1, 2, 3, 4]),  # no more than two pages are full
    ],
)
def test_packing_of_pages(
    scores: list[float], pages: int, num_recent: int, num_sinks: int, survivors: list[int]
) -> None:
    """Pages of two tokens: those with the largest sums survive, and each that is protected."""
    heavy = 2 * pages - num_recent - num_sinks
    slots = Budget(2 * pages + 2, heavy, num_recent, num_sinks, evict_every=2, unit=2)
    packed = pack_survivors(strip(scores), len(scores), slots)
    same(packed, strip([scores[i] for i in survivors], survivors))


def test_packing_of_pages_by_mean() -> None:
    """Each token's mean counts, not the mean of the page's sum."""
    slots = Budget(4, 2, 0, 0, evict_every=2, unit=2)
    scores = [4.0, 3.0, 2.0, 1.5]  # sums 7 and 3.5; means 1 + 1 and 1 + 1.5
    packed = pack_survivors(strip(scores), 4, slots, by_age=True)
    assert packed.position.tolist() == [2, 3]


def by_pages(
    inputs: Inputs, prompt: int, num_pages: int, num_recent: int, num_sinks: int, size: int
) -> list[set[int]]:
    """Positions that are held after the prompt and each later token, from a mask alone.

    Pages are cut anew from what is held whenever one goes, by the sums of what was paid to them.
    """
    num_tokens = inputs.key.shape[0]
    visible = causal(num_tokens)
    score = inputs.probabilities(visible)[:prompt].sum(dim=(0, 1))
    held, seen = list(range(prompt)), []

    def best(end: int) -> list[int]:
        pages = [held[start : start + size] for start in range(0, len(held), size)]

        def protected(page: list[int]) -> bool:
            return len(page) < size or page[0] < num_sinks or page[-1] >= end - num_recent

        order = sorted(pages, key=lambda p: (not protected(p), -float(score[p].sum()), p[0]))
        kept = order[: num_pages + (len(held) % size > 0)]
        return sorted(token for page in kept for token in page)

    for position in range(prompt - 1, num_tokens):
        if position >= prompt:
            held.append(position)
            visible[position] = False
            visible[position, held] = True
            score = score + inputs.probabilities(visible)[position].sum(0)
        if position == prompt - 1 or len(held) == (num_pages + 1) * size:
            held = best(position + 1)
        seen.append(set(held))
    return seen


@pytest.mark.parametrize("prompt", [1, 11, 12, 13, 25])
@pytest.mark.parametrize(("num_recent", "num_sinks"), [(0, 0), (3, 0), (5, 2)])
def test_pages_as_a_mask(prompt: int, num_recent: int, num_sinks: int) -> None:
    """The lowest page goes whenever the next token would need another one."""
    inputs, num_pages, size = Inputs.draw(60, 2, seed=prompt), 4, 3
    heavy = num_pages * size - num_recent - num_sinks
    one = head(16, num_recent, num_sinks)
    one.budget = Budget((num_pages + 1) * size, heavy, num_recent, num_sinks, size, size)
    _, held = run(one, inputs, [prompt])
    assert held == by_pages(inputs, prompt, num_pages, num_recent, num_sinks, size)
