# SPDX-License-Identifier: Apache-2.0
"""The numbers of the metrics, against what the shadow pool executed and vLLM's own counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.draws import draw_until_seen, drawn
from tests.scheduler.harness import BLOCK_SIZE, Simulation, make_scheduler, vllm_config
from tests.scheduler.observed import COUNTERS, Observed
from tests.scheduler.schedules import OPTIONS, PAGE_BUDGET, Schedule, schedules, step_tokens
from vllm_h2o.wire import PolicyStats

totals: Counter[str] = Counter()


CROWD: dict[str, Any] = {
    "schedule": Schedule(
        [("add", 8, 40, 5, None, None), ("add", 5, 40, 5, None, None), ("steps", 24), ("reset",)],
        BLOCK_SIZE, stop_rate=0.0, policy="fcfs", seed=1,
    ),
    "budget": 32,
    "options": (),
    "num_pages": 16,
}  # fmt: skip
"""More requests than pages: preempted again and again, whatever else is drawn."""


@drawn(150)
@given(
    schedule=schedules([BLOCK_SIZE], ["fcfs"]),
    budget=st.sampled_from([12, 32]),
    options=st.sampled_from(OPTIONS),
    max_batched=st.sampled_from([8, 20, 64]),
    num_pages=st.integers(16, 24),
    depth=st.sampled_from([1, 2]),
)
@example(**CROWD, max_batched=20, depth=1)
@example(**CROWD, max_batched=64, depth=1)
@example(**CROWD, max_batched=64, depth=2)
def random_schedules(
    schedule: Schedule,
    budget: int,
    options: tuple[tuple[str, object], ...],
    max_batched: int,
    num_pages: int,
    depth: int,
) -> None:
    """Through preemption, abort, resumption and failed allocation: each event counts once."""
    if ("evict_every", "page") in options:
        budget, num_pages = PAGE_BUDGET, max(num_pages, 20)
    max_batched = step_tokens(max_batched, options)
    config = vllm_config(budget, max_batched, 8, schedule.policy, depth == 2, options)
    simulation = schedule.play(Observed, config, schedule.num_blocks(num_pages), depth)
    simulation.compare()
    assert simulation.scheduler.stats_reporter.report() == PolicyStats(*[0] * 9)
    totals.update(simulation.reported)
    totals.update(simulation.levels)
    totals.update(simulation.count)


def test_totals_are_what_was_executed() -> None:
    """Over random schedules, in which none of the numbers stays at nothing."""
    seen = [name for name in COUNTERS if not name.startswith("pressure")]  # in test_pressure.py
    events = (*seen, "requests_at_capacity", "resident_tokens", "preempt", "abort", "resume")
    draw_until_seen(random_schedules, totals, dict.fromkeys(events, 50))


def test_of_one_request() -> None:
    """A prompt of 40 in 12 slots of 4 a page: 29 go at its end, and then one a token."""
    config = vllm_config(12, 64, 8, "fcfs", async_scheduling=False)
    simulation = Simulation(config, 40, depth=1)
    simulation.add(prompt_len=40, max_tokens=20)
    page, stock_page = 4 * 264, 4 * 256
    report = simulation.scheduler.stats_reporter.report
    simulation.step()
    assert report() == PolicyStats(29, 1, 0, 0, 0, 0, 11, 40, 10 * (stock_page - page))
    simulation.step()
    assert report() == PolicyStats(0, 0, 7, 0, 0, 1, 12, 41, 11 * stock_page - 3 * page)
    simulation.step()
    simulation.step()
    assert report() == PolicyStats(2, 0, 0, 0, 0, 1, 12, 43, 11 * stock_page - 3 * page)


@pytest.mark.parametrize("log_stats", [False, True])
def test_statistics_carry_it_where_they_are_on(log_stats: bool) -> None:
    """They are taken out again without a trace."""
    config = vllm_config(12, 64, 8, "fcfs", async_scheduling=False)
    stats = make_scheduler(config, 40, 4, log_stats).make_stats()
    assert (stats is not None) is log_stats
    if stats is not None:
        assert PolicyStats.take_from(stats.running_lora_adapters) == PolicyStats(*[0] * 9)
        assert stats.running_lora_adapters == {}
