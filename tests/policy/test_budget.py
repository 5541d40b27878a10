# SPDX-License-Identifier: Apache-2.0
"""How slots are divided."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_h2o.policy import Budget, Eviction, split_budget
from vllm_h2o.policy.budget import minimum_slots

ratios = st.floats(0, 1)
sinks = st.integers(0, 64)
block_sizes = st.sampled_from([1, 2, 8, 16, 32, 64, 128])


@given(st.integers(0, 1 << 20), block_sizes, ratios, sinks)
def test_parts_make_the_whole(
    above_least: int, block_size: int, recent_ratio: float, num_sinks: int
) -> None:
    """Whole pages; sinks, heavy and recent fill all but the slot of the next token."""
    slots = minimum_slots(recent_ratio, num_sinks) + above_least
    budget = split_budget(slots, block_size, recent_ratio, num_sinks)
    assert budget.capacity % block_size == 0
    assert slots <= budget.capacity < slots + block_size
    assert budget.kept == budget.capacity - 1
    assert budget.num_sinks + budget.num_heavy + budget.num_recent == budget.kept
    assert min(budget.num_heavy, budget.num_recent) >= 0
    assert budget.num_sinks == num_sinks


def test_recent_positions_are_added_token_by_token() -> None:
    """Within a prompt all are kept; at its end the first, and one more with each token after it."""
    budget = Budget(20, 9, 10, 0, first_recent=4)
    assert [budget.recent_at(t) for t in (-1, 0, 1, 5, 6, 7, 99)] == [10, 4, 5, 9, 10, 10, 10]
    assert Budget(20, 9, 10, 0).recent_at(0) == 10
    assert Budget(20, 16, 3, 0, first_recent=4).recent_at(0) == 3
    with pytest.raises(ValueError, match="negative"):
        Budget(20, 9, 10, 0, first_recent=-1)


@given(st.integers(2, 4096), block_sizes, ratios, ratios)
def test_more_ratio_is_no_less_recent(slots: int, block_size: int, a: float, b: float) -> None:
    """The recent window grows with its share, and misses it by half a token, or is of one."""
    low, high = sorted((a, b))
    first = split_budget(slots, block_size, low, 0)
    second = split_budget(slots, block_size, high, 0)
    assert first.num_recent <= second.num_recent
    lone = second.num_recent == 1 and high > 0
    assert abs(second.num_recent - high * second.kept) <= 0.5 + 1e-6 or lone


@pytest.mark.parametrize(
    ("slots", "block_size", "recent_ratio", "num_sinks", "expected"),
    [
        (64, 16, 0.5, 0, Budget(64, 31, 32, 0)),  # an odd rest: half a token goes to the recent
        (65, 16, 0.5, 0, Budget(80, 39, 40, 0)),
        (64, 16, 0.5, 1, Budget(64, 31, 31, 1)),
        (64, 16, 0.0, 0, Budget(64, 63, 0, 0)),
        (64, 16, 1.0, 4, Budget(64, 0, 59, 4)),
        (1, 1, 0.0, 0, Budget(1, 0, 0, 0)),
        (2, 1, 1.0, 0, Budget(2, 0, 1, 0)),
        (6, 1, 0.5, 4, Budget(6, 0, 1, 4)),
        (410, 128, 0.25, 0, Budget(512, 383, 128, 0)),
    ],
)
def test_split_budget_equals_examples_by_hand(
    slots: int, block_size: int, recent_ratio: float, num_sinks: int, expected: Budget
) -> None:
    """Numbers worked out by hand."""
    assert split_budget(slots, block_size, recent_ratio, num_sinks) == expected


@pytest.mark.parametrize(
    ("evict_every", "max_len", "expected"),
    [
        (1, 200, Budget(64, 31, 32, 0)),
        (8, 200, Budget(71, 31, 32, 0, 8)),
        (8, None, Budget(71, 31, 32, 0, 8)),
        (99, 100, Budget(112, 31, 32, 0, 49)),  # no sequence takes more than 7 pages
        (8, 64, Budget(64, 31, 32, 0)),
    ],
)
def test_slots_for_several_tokens(evict_every: int, max_len: int | None, expected: Budget) -> None:
    """As many tokens are kept; the slots for new tokens come on top."""
    budget = split_budget(64, 16, 0.5, 0, Eviction(every=evict_every), max_len)
    assert budget == expected and budget.kept == 63


@given(st.floats(1e-9, 1), sinks)
def test_the_least_budget(recent_ratio: float, num_sinks: int) -> None:
    """With pages of one slot, the one token beside the sinks is a recent one."""
    slots = minimum_slots(recent_ratio, num_sinks)
    budget = split_budget(slots, 1, recent_ratio, num_sinks)
    assert (budget.num_recent, budget.num_heavy) == (1, 0)


@pytest.mark.parametrize("parts", [(64, -1, 64, 0), (64, 64, -1, 0), (64, 64, 0, -1)])
def test_budget_refuses_negative_parts(parts: tuple[int, int, int, int]) -> None:
    """A budget cannot owe slots."""
    with pytest.raises(ValueError, match="negative part"):
        Budget(*parts)


@pytest.mark.parametrize("parts", [(64, 32, 32, 0), (64, 30, 32, 0), (0, 0, 0, 0)])
def test_parts_that_do_not_add_up(parts: tuple[int, int, int, int]) -> None:
    """The next token's slot is neither forgotten nor counted twice."""
    with pytest.raises(ValueError, match="capacity - evict_every"):
        Budget(*parts)


BY_PAGE = Eviction(unit="page")


@pytest.mark.parametrize(
    ("slots", "recent_ratio", "num_sinks", "every", "expected"),
    [
        (64, 0.5, 0, 1, Budget(64, 24, 24, 0, 16, 16)),
        (65, 0.5, 4, 1, Budget(80, 30, 30, 4, 16, 16)),
        # The page of the sinks is protected whole: no more than two are for recent tokens.
        (64, 1.0, 4, 1, Budget(64, 12, 32, 4, 16, 16)),
        (80, 0.3, 0, 2, Budget(80, 34, 14, 0, 32, 16)),
        (64, 0.0, 17, 1, Budget(64, 31, 0, 17, 16, 16)),
    ],
)
def test_budgets_of_whole_pages(
    slots: int, recent_ratio: float, num_sinks: int, every: int, expected: Budget
) -> None:
    """Numbers worked out by hand: the pages of the next tokens are part of the budget."""
    eviction = Eviction(every=every, unit="page")
    assert split_budget(slots, 16, recent_ratio, num_sinks, eviction) == expected


@given(st.integers(0, 500), st.sampled_from([8, 16]), ratios, st.integers(0, 40), st.data())
def test_protected_pages_always_fit(
    above_least: int, size: int, recent_ratio: float, num_sinks: int, data: st.DataObject
) -> None:
    """Pages with sinks or recent tokens are no more than survive, wherever the last page ends."""
    eviction = Eviction(every=data.draw(st.integers(1, 3)), unit="page")
    slots = minimum_slots(recent_ratio, num_sinks, eviction, size) + above_least
    budget = split_budget(slots, size, recent_ratio, num_sinks, eviction)
    assert budget.num_recent > 0 or recent_ratio == 0
    length = budget.capacity + data.draw(st.integers(0, 50))
    survivors = budget.survivors(length)
    assert (length - survivors) % size == 0 and survivors - budget.kept < size
    first_recent = length - budget.num_recent
    protected = {*range(num_sinks), *range(first_recent // size * size, length)}
    protected |= set(range(-(-num_sinks // size) * size))
    assert len(protected | set(range(length // size * size, length))) <= survivors


def test_survivors_of_whole_pages() -> None:
    """The page that is not full survives as well; a short request keeps all."""
    budget = split_budget(64, 16, 0.5, 0, BY_PAGE)
    assert [budget.survivors(n) for n in (5, 48, 63, 64, 65, 80)] == [5, 48, 63, 48, 49, 48]
    assert not budget.overwrites and budget.most_slots(100) == 48 + 15 + 100


def test_whole_pages_that_are_none() -> None:
    """Slots and evictions are whole pages."""
    for parts in ((60, 22, 22, 0, 16, 16), (64, 28, 28, 0, 8, 16)):
        with pytest.raises(ValueError, match="whole units"):
            Budget(*parts)
