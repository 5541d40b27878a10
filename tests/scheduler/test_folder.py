# SPDX-License-Identifier: Apache-2.0
"""What an engine keeps in files, and which of them another one uses."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scheduler.conversations import (
    TENANTS,
    Talking,
    Tenant,
    WithFiles,
    entries_of,
    first_turn,
)
from tests.scheduler.harness import vllm_config
from vllm_h2o.kernels.held import Held
from vllm_h2o.policy import Budget
from vllm_h2o.scheduler.answers import AnswersLate
from vllm_h2o.scheduler.folder import Folder, Kept
from vllm_h2o.scheduler.state import Left
from vllm_h2o.worker.files import write

BUDGET, TURN = Budget(16, 8, 7, 0), Left(40, 16, prompt=(0, 30))


def talk(folder: Path, policy: str = "h2o", after: Talking | None = None) -> WithFiles:
    """Requests of which the first asks to be kept; ``after`` others, whose files hold tokens."""
    options = (("name", policy), ("continuation", str(folder)))
    talking = WithFiles(vllm_config(12, 64, 8, "fcfs", False, options), 60, 1)
    talking.loses = 0.0
    if after:
        talking.pool.host, talking.pool.chosen_on_host = after.pool.host, after.pool.chosen_on_host
    return talking


def keep(talking: Talking, tenant: Tenant = TENANTS[0]) -> list[int]:
    """A first turn; its files are written by the step in which workers hear of its end."""
    text = first_turn(talking, tenant)
    assert talking.step().total_num_scheduled_tokens == 0
    return text


def found(talking: Talking, text: list[int], tenant: Tenant = TENANTS[0]) -> int:
    """Tokens from files with which a request begins."""
    request_id = talking.say(text, 1, tenant)
    plan = talking.step().residency_plan
    from_files = request_id in plan.continued and isinstance(plan.continued[request_id].place, str)
    talking.drain()
    return plan.requests[request_id].logical_start if from_files else 0


@pytest.mark.parametrize("tenant", [TENANTS[0], TENANTS[1], TENANTS[3]])
def test_later_engine_goes_on_for_the_same_tenant_alone(tenant: Tenant, tmp_path: Path) -> None:
    """By salt and budget; a prompt that ends sooner or differs finds nothing."""
    first = talk(tmp_path)
    text = keep(first, tenant)
    assert len(list(tmp_path.iterdir())) == 1
    for other in (TENANTS[0], TENANTS[1], TENANTS[3]):
        begun = found(talk(tmp_path, after=first), [*text, 1], other)
        assert begun == (35 if other == tenant else 0)
    assert found(talk(tmp_path), [*text[:-3], 1], tenant) == 0
    assert found(talk(tmp_path), [3, *text], tenant) == 0
    assert found(talk(tmp_path, "streaming"), [*text, 1], tenant) == 0


def test_adapters_are_not_kept(tmp_path: Path) -> None:
    """Which has its own weights; the front end refuses such a request."""
    keep(talk(tmp_path), TENANTS[2])
    assert list(tmp_path.iterdir()) == []


def test_a_reset_forgets_files_until_they_are_written_again(tmp_path: Path) -> None:
    """VLLM resets its cache when weights may have changed."""
    talking = talk(tmp_path)
    text = keep(talking)
    assert talking.scheduler.reset_prefix_cache()
    assert found(talking, [*text, 1]) == 0
    assert found(talk(tmp_path, after=talking), [*text, 1]) == 35


def kept(path: Path, made_by: str = "me", num_workers: int = 2) -> tuple[Folder, str]:
    """A folder with a prompt of which no worker has written anything, and its files' place."""
    folder = Folder(path, made_by, num_workers)
    request = Kept("any", tuple(range(50)), "salt", BUDGET, TURN).request()
    place = folder.save(request, BUDGET, TURN, (3, 4))
    (saved,) = folder.take()
    assert (saved.place, saved.source, saved.num_used) == (place, (3, 4), 16)
    assert folder.take() == ()
    for rank in range(num_workers):
        assert not folder.is_whole(place)
        write(place, rank, num_workers, [Held({"score": torch.zeros(9)})], saved.header)
    return folder, place


def test_every_worker_has_to_write(tmp_path: Path) -> None:
    """What is there is not written again."""
    folder, place = kept(tmp_path)
    assert folder.is_whole(place)
    request = Kept("any", tuple(range(50)), "salt", BUDGET, TURN).request()
    assert folder.save(request, BUDGET, TURN, (3, 4)) == place
    assert folder.take() == ()
    (later,) = Folder(tmp_path, "me", 2).read()
    assert later == Kept(place, tuple(range(40)), "salt", BUDGET, TURN)


def test_files_of_others_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another engine's, and what only has such a name."""
    kept(tmp_path, num_workers=1)
    kept(tmp_path, "another", 1)
    caplog.set_level(logging.INFO, "vllm.kv_policy")
    (tmp_path / "mine.0-of-1.00000000").write_text("a shopping list")
    (tmp_path / "notes.txt").write_text("a shopping list")
    assert len(list(Folder(tmp_path, "me", 1).read())) == 1
    assert "1 prompts are kept; 2 files are of another model" in caplog.text


@pytest.mark.parametrize(
    "header",
    ["", "[]", "3", "{}", '{"made_by": "me"}', '{"made_by": "me", "tokens": [1], "turn": {}}']
    + ['{"made_by": "me", "tokens": [1], "turn": {"logical_len": 9, "resident_len": 1}}'],
)
def test_file_with_an_odd_header_is_left_alone(header: str, tmp_path: Path) -> None:
    """An engine starts beside whatever is in the folder."""
    write(str(tmp_path / "doc"), 0, 1, [Held({"score": torch.zeros(1)})], header)
    assert list(Folder(tmp_path, "me", 1).read()) == []
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("num_bytes", [0, 5, 100])
def test_file_that_is_cut_is_not_whole(num_bytes: int, tmp_path: Path) -> None:
    """Its name says what it was."""
    folder, place = kept(tmp_path)
    os.truncate(next(tmp_path.glob("*.1-of-2.*")), num_bytes)
    assert not folder.is_whole(place)


def answers(talking: Talking) -> list[tuple[int, str, bool]]:
    """Record what front ends are told: in which step, whom, and whether that ends."""
    told: list[tuple[int, str, bool]] = []
    scheduler, steps = talking.scheduler, iter(range(1000))
    assert isinstance(scheduler, AnswersLate)
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
