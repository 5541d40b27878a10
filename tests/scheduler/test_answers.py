# SPDX-License-Identifier: Apache-2.0
"""The end of an answer waits for the files of its request, and for nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.conversations import TENANTS, Talking, entries_of
from tests.scheduler.test_folder import found, talk


def answers(talking: Talking) -> list[tuple[int, str, bool]]:
    """Record what front ends are told: in which step, whom, and whether that ends."""
    told: list[tuple[int, str, bool]] = []
    scheduler, steps = talking.scheduler, iter(range(1000))
    update = scheduler.update_from_output

    def record(*args: Any) -> Any:
        outputs, step = update(*args), next(steps)
        told.extend(
            (step, output.request_id, output.finished)
            for each in outputs.values()
            for output in each.outputs
        )
        return outputs

    scheduler.update_from_output = record
    return told


def finish(talking: Talking) -> None:
    """Step until there is nothing to do, also for requests that have ended."""
    while talking.scheduler.has_requests():
        talking.step()
    talking.drain()


def test_only_the_end_of_a_kept_answer_is_late(tmp_path: Path) -> None:
    """By one step, in which the file is written; each token is told once."""
    talking = talk(tmp_path)
    told = answers(talking)
    kept = talking.say(range(10, 40), 3, TENANTS[0])
    other = talking.say(range(50, 80), 3, TENANTS[0])
    finish(talking)
    ends = {request_id: step for step, request_id, ends in told if ends}
    assert ends[kept] == ends[other] + 1
    assert [sum(i == request_id for _, i, _ in told) for request_id in (kept, other)] == [3, 3]
    again = talking.say(range(10, 40), 3, TENANTS[1])  # not kept, then kept and there already
    talking.say(range(10, 40), 3, TENANTS[0])
    finish(talking)
    assert [ends for _, request_id, ends in told if request_id == again] == [False, False, True]


@pytest.mark.parametrize("when", [0, 1])
def test_reset_lets_answers_go(when: int, tmp_path: Path) -> None:
    """Before the step that would have written the file, or after it."""
    talking = talk(tmp_path)
    told = answers(talking)
    talking.say(range(10, 40), 1, TENANTS[0])
    for _ in range(1 + when):
        talking.step()
    assert talking.scheduler.reset_prefix_cache()
    finish(talking)
    assert [ends for *_, ends in told] == [True]
    assert len(list(tmp_path.iterdir())) == when


def test_engines_share_a_folder_while_they_run(tmp_path: Path) -> None:
    """What one has written the other finds, until its weights or cache are no more the first."""
    one, two = talk(tmp_path), talk(tmp_path)
    two.pool.host, two.pool.chosen_on_host = one.pool.host, one.pool.chosen_on_host
    for number, seed in enumerate((10, 100, 200)):
        one.say(range(seed, seed + 30), 6, TENANTS[0])
        one.count["add"] += 1  # so that the next one is kept, too
        finish(one)
        text = one.said[-1][1]
        if number == 2:
            entries_of(two).clear()
        assert found(two, [*text, 1]) == (35 if number < 2 else 0)
