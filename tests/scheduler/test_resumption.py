# SPDX-License-Identifier: Apache-2.0
"""Preempted requests: what they need to be computed again, and who waits for them."""

from __future__ import annotations

import pytest

from tests.scheduler.harness import BLOCK_SIZE, Simulation, vllm_config
from tests.scheduler.schedules import CHUNK, H2O2, PAGE, PREFIXES, SNAPKV, Option

BUDGET = 12
PAGES_AT_CAPACITY = BUDGET // BLOCK_SIZE


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "options",
    [(), H2O2, PAGE, (CHUNK,), SNAPKV, (PREFIXES, *SNAPKV)],
    ids=["h2o", "h2o2", "page", "chunk", "snapkv", "prefixes"],
)
def test_schedule_preempted_past_its_budget_needs_a_budget_and_a_chunk(
    options: tuple[Option, ...], depth: int
) -> None:
    """Nobody behind it waits longer than it is computed again, though memory stays short.

    A request of a small budget is preempted for one that holds everything, which goes on.
    """
    config = vllm_config(BUDGET, 64, 8, "priority", depth == 2, options)
    simulation = Simulation(config, 1 + 20, depth)
    states = simulation.scheduler.ledger.states
    whole, small = simulation.add(4, 58, budget="full"), simulation.add(8, 50, priority=5)
    for _ in range(32):
        simulation.step()
    held = simulation.pages_of(small) - states[small].first_block_idx
    assert held <= PAGES_AT_CAPACITY < BUDGET
    short = simulation.add(24, 8, budget="full")
    while small in states:
        simulation.step()
    behind = simulation.add(8, 5, priority=6)
    while short in simulation.scheduler.requests:
        simulation.step()
    num_tokens = simulation.scheduler.requests[small].num_tokens
    most_free, chunks, waited = simulation.num_free, 0, 0
    assert -(-num_tokens // BLOCK_SIZE) > most_free  # its whole length has no room
    while behind not in states:
        plan = simulation.step().residency_plan.requests.get(small)
        waited += 1
        chunks += plan is not None and plan.in_prompt
    assert whole in states
    assert waited <= -(-num_tokens // BLOCK_SIZE) and chunks > 0
    while states[small].in_prompt:
        simulation.step()
        assert simulation.pages_of(small) <= held + PAGES_AT_CAPACITY
    simulation.drain()
    assert simulation.count["pack resumed"] > 0
