# SPDX-License-Identifier: Apache-2.0
"""The manager's own checks: they must be able to fail."""

from __future__ import annotations

import pytest

from tests.scheduler.harness import BLOCK_SIZE, Simulation, vllm_config
from vllm_h2o.errors import IntegrityError
from vllm_h2o.policy import Budget
from vllm_h2o.scheduler.block_manager import HeavyHitterManager
from vllm_h2o.scheduler.ledger import Ledger


@pytest.fixture
def simulation() -> Simulation:
    """Two requests with pages."""
    config = vllm_config(12, 64, 8, "fcfs", async_scheduling=False)
    simulation = Simulation(config, 40, depth=1)
    for _ in range(2):
        simulation.add(prompt_len=9, max_tokens=30)
    for _ in range(3):
        simulation.step()
    return simulation


def blocks(simulation: Simulation, request_id: str) -> list:
    """The live list of a request's pages."""
    return simulation.scheduler.block_manager.req_to_blocks[request_id]


def test_a_lost_page_is_seen(simulation: Simulation) -> None:
    """free + held must be the total."""
    blocks(simulation, "r0").pop()
    with pytest.raises(IntegrityError, match=r"free \+ 5 held of 39"):
        simulation.scheduler.check_integrity()


def test_a_page_held_twice_is_seen(simulation: Simulation) -> None:
    """Even where the sum is right."""
    blocks(simulation, "r0")[-1] = blocks(simulation, "r1")[0]
    with pytest.raises(IntegrityError, match=r"wrong reference counts: \[\d+\]"):
        simulation.scheduler.check_integrity()


def test_a_page_freed_while_held_is_seen(simulation: Simulation) -> None:
    """Its reference count is 0 and the sum is one too large."""
    simulation.scheduler.block_manager.block_pool.free_blocks([blocks(simulation, "r0")[-1]])
    with pytest.raises(IntegrityError, match=r"wrong reference counts: \[\d+\]"):
        simulation.scheduler.check_integrity()


def test_lengths_without_pages_are_seen(simulation: Simulation) -> None:
    """Pages without lengths, and more pages than resident tokens need."""
    manager = simulation.scheduler.block_manager
    manager.ledger.close("r0")
    with pytest.raises(IntegrityError, match="lengths without owners: {'r0'}"):
        manager.check_integrity()


def test_a_length_that_vllm_does_not_count_is_seen(simulation: Simulation) -> None:
    """Logical length is vLLM's num_computed_tokens, always."""
    simulation.scheduler.requests["r1"].num_computed_tokens += 1
    with pytest.raises(IntegrityError, match="vLLM counts 12 computed tokens, the ledger 11"):
        simulation.scheduler.check_integrity()


def test_a_manager_without_its_scheduler_raises(simulation: Simulation) -> None:
    """It would not know when a prompt ends."""
    bound = simulation.scheduler.block_manager
    manager = HeavyHitterManager(
        bound.kv_cache_spec,
        block_pool=bound.block_pool,
        enable_caching=False,
        kv_cache_group_id=0,
        scheduler_block_size=BLOCK_SIZE,
    )
    with pytest.raises(IntegrityError, match="without HeavyHitterScheduler"):
        manager.new_step_starts()
        manager.ledger.num_pages(1)
    manager.bind(Ledger(Budget(12, 5, 6, 0), BLOCK_SIZE), {})
    assert manager.ledger.num_pages(5) == 2
