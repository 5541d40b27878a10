# SPDX-License-Identifier: Apache-2.0
"""How many slots each KV head of a layer gets: the same sum, and never too few or many."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import drawn
from vllm_h2o.kernels.reference import Head
from vllm_h2o.kernels.split import pack_layer, split_capacity
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.policy import Budget


def strips(scores: torch.Tensor) -> list[Strip]:
    """A strip for each head of scores [H, L], in order of position."""
    length = scores.shape[1]
    key, position = torch.zeros(length, 4), torch.arange(length)
    return [Strip(key, key, score.double(), position) for score in scores]


@drawn(200)
@given(data=st.data())
def test_pages_of_heads(data: st.DataObject) -> None:
    """Whole pages; what must stay, and a heavy hitter; no more than there are tokens to keep."""
    num_heads, size = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([1, 4, 16]))
    capacity = size * data.draw(st.integers(2, 12))
    sinks = data.draw(st.integers(0, min(3, capacity - 1)))
    recent = data.draw(st.integers(0, capacity - 1 - sinks))
    length = capacity + data.draw(st.integers(0, 3 * capacity))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    scores = torch.randint(0, 9, (num_heads, length), generator=draw)
    scores = scores * torch.randint(1, 20, (num_heads, 1), generator=draw)
    num_heavy = capacity - 1 - sinks - recent
    asked = (strips(scores), length, Budget(capacity, num_heavy, recent, sinks), size)
    slots = split_capacity(*asked)
    assert slots == split_capacity(*asked)
    assert sum(slots) == num_heads * capacity
    assert all(num % size == 0 for num in slots)
    assert min(slots) >= sinks + recent + 1 + min(num_heavy, 1)
    assert max(slots) <= length + 1
    if not num_heavy or num_heads == 1:
        assert set(slots) == {capacity}


def test_split_counts_equal_a_calculation_by_hand() -> None:
    """Three tenths as if equal, seven by the best tokens: worked by hand."""
    budget = Budget(10, 6, 3, 0)
    # Ten slots a head: 1 for the next token, 3 recent, 6 heavy. Head 1 has the best 12 of both.
    scores = torch.cat([torch.zeros(1, 20), torch.ones(1, 20)])
    # Of 17 candidates of head 1 twelve are among the best twelve: 4 + 1.8 + 8.4 = 14.2, and 5.8.
    assert split_capacity(strips(scores), 20, budget, 1) == [6, 14]
    # Pages of 5: 2.84 and 1.16 of them.
    assert split_capacity(strips(scores), 20, budget, 5) == [5, 15]
    # Of equal scores, those of the lower head.
    assert split_capacity(strips(torch.ones(2, 20)), 20, budget, 1) == [14, 6]
    # With 12 tokens a head has 9 candidates: 12.1 and 7.9 slots.
    assert split_capacity(strips(scores[:, :12]), 12, budget, 1) == [8, 12]


def test_pack_layer_keeps_protected_and_best_tokens() -> None:
    """Each head keeps its sinks, its recent tokens and as many others as it has room for."""
    scores = torch.stack([torch.arange(20.0), 100 - torch.arange(20.0)])
    budget = Budget(10, 5, 3, 1)
    heads = [Head(strip, budget, splits=True, logical_len=20) for strip in strips(scores)]
    pack_layer(heads, 1)
    assert [head.budget.capacity for head in heads] == [7, 13]
    assert heads[0].strip.position.tolist() == [0, 15, 16, 17, 18, 19]
    assert heads[1].strip.position.tolist() == [*range(9), 17, 18, 19]
