# SPDX-License-Identifier: Apache-2.0
"""What an engine keeps in files, and which of them another one uses."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.conversations import TENANTS, Talking, Tenant, entries_of, first_turn
from tests.scheduler.harness import vllm_config
from tests.scheduler.with_files import WithFiles
from vllm_h2o import files
from vllm_h2o.scheduler import waits
from vllm_h2o.scheduler.answers import AnswersLate


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without another request waits for a check as long as the machine needs."""
    monkeypatch.setattr(waits, "IDLE", 20)


def talk(
    folder: Path | str,
    policy: str = "h2o",
    after: Talking | None = None,
    num_blocks: int = 60,
) -> WithFiles:
    """Requests of which the first asks to be kept; ``after`` others, whose files hold tokens."""
    options = (("name", policy), ("continuation", str(folder)))
    talking = WithFiles(vllm_config(12, 64, 8, "fcfs", False, options), num_blocks, 1)
    talking.loses = 0.0
    if after:
        talking.pool.host, talking.pool.chosen_on_host = after.pool.host, after.pool.chosen_on_host
    return talking


def keep(talking: Talking, tenant: Tenant = TENANTS[0]) -> list[int]:
    """A first turn; its files are written by the step in which workers hear of its end."""
    text = first_turn(talking, tenant)
    assert talking.step().total_num_scheduled_tokens == 0
    return text


def after_another(folder: Path) -> tuple[WithFiles, list[int]]:
    """An engine that starts after another, and the text that the other one has kept."""
    first = talk(folder)
    text = keep(first)
    return talk(folder, after=first), text


def found(talking: Talking, text: list[int], tenant: Tenant = TENANTS[0]) -> int:
    """Tokens from files with which a request begins."""
    request_id = talking.say(text, 1, tenant)
    plan = talking.step().residency_plan
    from_files = request_id in plan.continued and isinstance(
        plan.continued[request_id].place, tuple
    )
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


def test_file_is_as_recent_as_what_memory_holds_of_it(tmp_path: Path) -> None:
    """A question that goes on from memory counts; what memory drops is written again if need be."""
    talking = talk(f"{tmp_path}:1", num_blocks=13)
    text = keep(talking)
    (path,) = tmp_path.iterdir()
    os.utime(path, ns=(1, path.stat().st_mtime_ns))
    talking.say([*text, 1], 1, TENANTS[0])
    talking.drain()
    assert talking.count["continue"] == 1 and talking.count["read"] == 0
    assert path.stat().st_atime_ns > 1
    path.unlink()
    talking.say(range(200, 240), 2, TENANTS[1])  # it takes the pages
    talking.drain()
    assert path.exists() and talking.count["leave"] > 0
    assert found(talking, [*text, 2]) == 35


def test_turns_that_memory_drops_are_found_by_a_later_engine(tmp_path: Path) -> None:
    """Of the same tenant alone; nothing of an adapter's is written."""
    first = talk(f"{tmp_path}:1", num_blocks=13)
    first.asks_to_save = False
    texts = [first_turn(first, tenant) for tenant in TENANTS]
    first.say(range(200, 240), 2, TENANTS[0])
    first.drain()
    assert first.count["leave"] == 3 and len(list(tmp_path.iterdir())) == 3
    for number, (text, tenant) in enumerate(zip(texts, TENANTS, strict=True)):
        later = talk(f"{tmp_path}:1", after=first)
        assert found(later, [*text, 1], tenant) == (0 if number == 2 else 35)
        assert found(later, [*text, 2], tenant._replace(salt="another")) == 0


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


@contextmanager
def slow_checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checks of files do not end before this context does."""
    may_end, checksum = threading.Event(), files.checksum

    def wait(file: Any) -> str:
        assert threading.current_thread() is threading.main_thread() or may_end.wait(60)
        return checksum(file)

    with monkeypatch.context() as patched:
        patched.setattr(waits, "IDLE", 0.005)
        patched.setattr(files, "checksum", wait)
        try:
            yield
        finally:
            may_end.set()


def test_others_go_on_while_a_file_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running requests, and those behind it in the queue; then it continues from the file."""
    later, text = after_another(tmp_path)
    running = later.say(range(500, 520), 30, TENANTS[1])
    later.step()
    looks, names = list[object](), files.names
    monkeypatch.setattr(files, "names", lambda *of: looks.append(of) or names(*of))
    with slow_checks(monkeypatch):
        waiting = later.say([*text, 1], 2, TENANTS[0])
        behind = later.say(range(700, 710), 4, TENANTS[1])
        for step in range(8):
            looks.clear()
            scheduled = later.step().num_scheduled_tokens
            assert running in scheduled and waiting not in scheduled
            assert later.scheduler.checking == {waiting} and len(looks) <= 1
            assert not list(later.scheduler._pages_waited_for())
            assert (behind in scheduled) == (step < 4)
        assert later.scheduler.requests[waiting] in later.scheduler.waiting
    wait_for_checks(later)
    plan = later.step().residency_plan
    assert isinstance(plan.continued[waiting].place, tuple)
    assert plan.requests[waiting].logical_start == 35
    finish(later)
    assert later.checked.num_open == 0


def wait_for_checks(talking: WithFiles) -> None:
    """Wait until all are done."""
    while any(not check.done() for _, check in talking.checked._checks.values()):
        talking.checked.wait(10)


def test_step_without_others_waits_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that an abort is not late; the check may end after it, and serves the next request."""
    later, text = after_another(tmp_path)
    with slow_checks(monkeypatch):
        waiting = later.say([*text, 1], 2, TENANTS[0])
        begun = time.monotonic()
        for _ in range(3):
            assert later.step().total_num_scheduled_tokens == 0
        assert time.monotonic() - begun < 10
        later.abort([waiting])
        assert not later.scheduler.has_unfinished_requests()
        assert not later.scheduler.deferred_waiting
    assert found(later, [*text, 1]) == 35


def test_reset_lets_a_request_go_that_waits_for_a_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is computed anew."""
    later, text = after_another(tmp_path)
    with slow_checks(monkeypatch):
        waiting = later.say([*text, 1], 2, TENANTS[0])
        assert later.step().total_num_scheduled_tokens == 0
        assert later.scheduler.reset_prefix_cache()
        assert later.step().residency_plan.requests[waiting].logical_start == 0
        later.drain()


def test_file_that_is_gone_or_cut_after_its_check_has_begun_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that waits for it is computed anew."""
    for lose in (Path.unlink, lambda path: os.truncate(path, 9)):
        later, text = after_another(tmp_path)
        with slow_checks(monkeypatch):
            waiting = later.say([*text, 1], 2, TENANTS[0])
            assert later.step().total_num_scheduled_tokens == 0
            lose(next(tmp_path.iterdir()))
        plan = later.step().residency_plan
        assert plan.requests[waiting].logical_start == 0 and not plan.continued
        later.drain()


def test_file_that_is_removed_once_its_step_is_scheduled_is_read(tmp_path: Path) -> None:
    """The pool reads it as a worker does; then it is closed, and the next request finds nothing."""
    later, text = after_another(tmp_path)
    later.pool.start = lambda: [path.unlink() for path in tmp_path.iterdir()]
    assert found(later, [*text, 1]) == 35
    assert list(tmp_path.iterdir()) == [] and later.checked.num_open == 0
    assert found(later, [*text[:35], 2, 3]) == 0


def test_prompts_whose_files_are_gone_are_forgotten(tmp_path: Path) -> None:
    """And are found again when another engine writes the same."""
    one, two = talk(tmp_path), talk(tmp_path)
    two.pool.host, two.pool.chosen_on_host = one.pool.host, one.pool.chosen_on_host
    text = keep(one)
    for talking in (one, two):
        talking.asks_to_save = False
    assert found(two, [*text, 1]) == 35
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.unlink()
    for talking in (one, two):
        talking.say(range(900, 910), 1, TENANTS[0])
        talking.drain()
        folder = talking.scheduler.folder
        assert folder is not None
        assert not entries_of(talking)._kept_at and not entries_of(talking)._kept
        assert not (folder._seen or folder._found or folder._named or folder.checked._checks)
    path.write_bytes(content)
    later = talk(tmp_path, after=one)
    later.asks_to_save = False
    for talking in (one, two, later):
        talking.say(range(910, 920), 1, TENANTS[0])
        talking.drain()
        assert [*entries_of(talking)._kept_at] == [str(path).split(".0-of-1.")[0]]
    assert found(later, [*text, 1]) == 35
