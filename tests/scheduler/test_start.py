# SPDX-License-Identifier: Apache-2.0
"""Lines that the scheduler logs at its start: the schedule, and whether KV heads share slots."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.scheduler.harness import make_scheduler, vllm_config
from tests.scheduler.schedules import PAGE, Option
from vllm_h2o.scheduler import scheduler

Start = Callable[..., str]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start a scheduler with some options; returns its lines."""

    def started(*options: Option) -> str:
        lines: list[str] = []
        monkeypatch.setattr(scheduler.logger, "info", lambda text, *args: lines.append(text % args))
        make_scheduler(vllm_config(20, 64, 8, "fcfs", False, options), 41, 4)
        return "\n".join(lines)

    return started


@pytest.mark.parametrize(
    ("options", "evicts"),
    [
        ((), "tokens (9 heavy, 10 recent, 0 sinks, 1 for the incoming token) = 5 pages of 4; the"),
        ((("evict_every", 6),), "6 for incoming tokens) = 7 pages of 4, and evicts 6 tokens at a"),
        (PAGE, "4 for incoming tokens) = 5 pages of 4, and evicts whole pages of 4 tokens; the"),
    ],
)
def test_start_names_a_schedule_that_is_not_the_default(
    start: Start, options: tuple[Option, ...], evicts: str
) -> None:
    """A user sees what a page or a number of tokens comes to."""
    assert evicts in start(*options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "h2o2: the KV heads of a layer share slots; numbers of slots are means.\n"),
        ((("split", "none"),), ""),
        ((("evict_every", 6),), "do not share slots, as they would without evict_every=6.\n"),
    ],
)
def test_start_tells_why_a_default_split_is_off(
    start: Start, options: tuple[Option, ...], says: str
) -> None:
    """Not where the user has switched it off."""
    text = start(("name", "h2o2"), ("observation_window", 3), *options)
    assert says in text and ("share slots" in text) is bool(says)
