# SPDX-License-Identifier: Apache-2.0
"""A prompt that a request asked to keep is asked again by an engine that starts later."""

from __future__ import annotations

import os
import re
import shlex
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, RequestOutput

from tests.e2e import ranks
from tests.e2e.conversations import SMALL, likely, own_text, starts
from tests.e2e.harness import engine, generate, smollm2, tiny_llama
from tests.e2e.server import LONGER, MODEL, Completing, blocks, run
from tests.house_rules import ROOT
from vllm_h2o import files
from vllm_h2o.options.request import RefusedRequestError
from vllm_h2o.scheduler.scheduler import HeavyHitterScheduler

DOCUMENT = own_text(1, 90)
QUESTION = [*DOCUMENT, *own_text(2, 5)]
KEPT = {"kv_save": 1}
WHAT: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("h2o", {}, {}),
    ("h2o2", {"observation_window": 4}, {"kv_cache_dtype": "fp8"}),
    ("h2o2", {"score": "reconstruction"}, {}),
    ("h2o", {"split": "heads"}, {"dtype": "bfloat16"}),
    ("snapkv", {"observation_window": 6}, {"enable_prefix_caching": True}),
    ("streaming", {}, {}),
)


@pytest.fixture
def any_length(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Turns continue however many steps they take."""
    monkeypatch.setattr("vllm_h2o.scheduler.conversations.FOUND_PER_STEP", 0)
    return monkeypatch


def remove_once_scheduled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a step is to read is gone before its workers hear of it."""
    schedule = HeavyHitterScheduler.schedule

    def then_remove(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        for path in folder.iterdir() if output.residency_plan.continued else ():
            path.unlink()
        return output

    monkeypatch.setattr(HeavyHitterScheduler, "schedule", then_remove)


def ask(llm: LLM, prompt: list[int] = QUESTION, **extra_args: Any) -> RequestOutput:
    """One answer, with its log-probabilities."""
    (output,) = generate(llm, [prompt], 12, logprobs=1, extra_args=extra_args)
    return output


def kept_and_asked(model: str, folder: Path) -> RequestOutput:
    """The answer of an engine that keeps the document, and continues from it."""
    with starts(model, folder) as llm:
        generate(llm, [DOCUMENT], 1, extra_args=KEPT)
        return ask(llm)


@pytest.mark.parametrize(("policy", "options", "args"), WHAT, ids=[f"{p} {o}" for p, o, _ in WHAT])
def test_later_engine_answers_as_the_one_that_read_it(
    policy: str,
    options: dict[str, Any],
    args: dict[str, Any],
    model: str,
    tmp_path: Path,
    any_length: pytest.MonkeyPatch,
) -> None:
    """Token for token and bit for bit; what is not kept is not found."""
    answers = []
    for is_first in (True, False, False):
        with starts(model, tmp_path, policy, options, **args) as llm:
            if is_first:
                generate(llm, [DOCUMENT], 1, extra_args=KEPT)
                generate(llm, [own_text(3, 80)], 1)
            answers.append(ask(llm))
            assert answers[-1].num_cached_tokens == len(DOCUMENT)
            assert ask(llm, [*own_text(3, 80), 7]).num_cached_tokens == (80 if is_first else 0)
    assert likely(answers[0]) == likely(answers[1]) == likely(answers[2])
    assert len(list(tmp_path.iterdir())) == 1


def test_only_the_same_engine_and_budget_find_it(
    model: str, tmp_path: Path, any_length: pytest.MonkeyPatch
) -> None:
    """Another policy, page size, budget or model computes anew, and leaves the file there."""
    other = tiny_llama(tmp_path / "other", 4, 2)
    kept = tmp_path / "kept"
    with starts(model, kept) as llm:
        generate(llm, [DOCUMENT], 1, extra_args=KEPT)
        ask(llm, kv_budget=32)
    changed: tuple[dict[str, Any], ...] = (
        {"policy": "streaming"},
        {"options": {"num_sink_tokens": 3}},
        {"block_size": 32},
        {"model": other},
    )
    for change in changed:
        with starts(**{"model": model, "folder": kept, **change}) as llm:
            assert ask(llm).num_cached_tokens == 0
    with starts(model, kept) as llm:
        assert ask(llm, kv_budget=32).num_cached_tokens == 0
        assert ask(llm).num_cached_tokens == len(DOCUMENT)
        assert ask(llm, [5, *QUESTION]).num_cached_tokens == 0


@pytest.mark.parametrize("how", ["cut", "changed", "gone"])
def test_file_that_is_not_as_it_was_written_is_not_used(
    how: str, model: str, tmp_path: Path, any_length: pytest.MonkeyPatch
) -> None:
    """The document is computed anew, also in an engine that has used the file before."""
    with starts(model, tmp_path) as llm:
        generate(llm, [DOCUMENT], 1, extra_args=KEPT)
        ask(llm, own_text(4, 40))
    with starts(model, tmp_path) as llm:
        assert ask(llm).num_cached_tokens == len(DOCUMENT)
        (path,) = tmp_path.iterdir()
        if how == "gone":
            path.unlink()
        elif how == "cut":
            os.truncate(path, path.stat().st_size - 1)
        else:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        assert ask(llm, [*DOCUMENT, 9]).num_cached_tokens == 0
        generate(llm, [DOCUMENT], 1, extra_args=KEPT)
        ask(llm, own_text(4, 40))
    with starts(model, tmp_path) as llm:
        assert ask(llm).num_cached_tokens == len(DOCUMENT)
    assert len(list(tmp_path.iterdir())) == 1


def test_file_that_is_removed_before_the_worker_reads_it_is_read(
    model: str, tmp_path: Path, any_length: pytest.MonkeyPatch
) -> None:
    """Token for token and bit for bit; whoever asks next computes the document anew."""
    first = kept_and_asked(model, tmp_path)
    remove_once_scheduled(tmp_path, any_length)
    with starts(model, tmp_path) as llm:
        answer = ask(llm)
        assert answer.num_cached_tokens == len(DOCUMENT)
        assert likely(answer) == likely(first)
        assert list(tmp_path.iterdir()) == []
        assert ask(llm, [*DOCUMENT, 9]).num_cached_tokens == 0


def test_requests_are_answered_while_a_file_is_checked(
    model: str, tmp_path: Path, any_length: pytest.MonkeyPatch
) -> None:
    """The check ends with the last of their steps; then the question is answered from the file."""
    first = kept_and_asked(model, tmp_path)
    may_end, checksum, schedule = threading.Event(), files.checksum, HeavyHitterScheduler.schedule
    running: list[set[str]] = []

    def check_late(file: Any) -> str:
        assert may_end.wait(60)
        return checksum(file)

    def record(self: HeavyHitterScheduler, *args: Any) -> Any:
        output = schedule(self, *args)
        running.append(set(output.num_scheduled_tokens))
        if running[-1] == set() and len(running) > 1:
            may_end.set()
        return output

    any_length.setattr(files, "checksum", check_late)
    any_length.setattr(HeavyHitterScheduler, "schedule", record)
    with starts(model, tmp_path) as llm:
        answer, *_ = generate(llm, [QUESTION, own_text(6, 40), own_text(7, 40)], 12, logprobs=1)
    assert answer.num_cached_tokens == len(DOCUMENT)
    assert likely(answer) == likely(first)
    assert [len(ids) for ids in running[:12]] == [2] * 12
    assert [len(ids) for ids in running if ids][12:] == [1] * 12


def test_folder_that_cannot_be_written_to_fails_no_request(
    model: str, tmp_path: Path, any_length: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so; the entry in the pool is still there."""
    folder = tmp_path / "kept"
    with starts(model, folder) as llm:
        folder.rmdir()
        generate(llm, [DOCUMENT], 1, extra_args=KEPT)
        assert ask(llm).num_cached_tokens == len(DOCUMENT)
    assert "a prompt's cache is not saved to" in caplog.text


def test_new_weights_are_not_those_of_the_files(
    model: str, tmp_path: Path, any_length: pytest.MonkeyPatch
) -> None:
    """What is computed with them is not kept; the files are there for the next start."""
    with starts(model, tmp_path) as llm:
        generate(llm, [DOCUMENT], 1, extra_args=KEPT)
        ask(llm, own_text(4, 40))
    with starts(model, tmp_path) as llm:
        llm.collective_rpc("reload_weights")
        assert ask(llm).num_cached_tokens == 0
        generate(llm, [own_text(5, 70)], 1, extra_args=KEPT)
        ask(llm, own_text(4, 40))
    assert len(list(tmp_path.iterdir())) == 1
    with starts(model, tmp_path) as llm:
        assert ask(llm).num_cached_tokens == len(DOCUMENT)


def test_two_ranks_keep_a_file_each(
    model: str, tmp_path: Path, any_length: pytest.MonkeyPatch
) -> None:
    """Each reads its own, also if it is gone by then; to be found both have to be there."""
    ranks.install(any_length)
    any_length.setenv("TORCH_COMPILE_DISABLE", "1")
    with starts(model, tmp_path, tensor_parallel_size=2) as llm:
        generate(llm, [DOCUMENT], 1, extra_args=KEPT)
        first = ask(llm)
    kept = {path: path.read_bytes() for path in sorted(tmp_path.iterdir())}
    assert [path.name.split(".")[1] for path in kept] == ["0-of-2", "1-of-2"]
    with any_length.context() as removing:
        remove_once_scheduled(tmp_path, removing)
        with starts(model, tmp_path, tensor_parallel_size=2) as llm:
            later = ask(llm)
    assert later.num_cached_tokens == first.num_cached_tokens == len(DOCUMENT)
    assert likely(later) == likely(first) and list(tmp_path.iterdir()) == []
    path, content = next(iter(kept.items()))
    path.write_bytes(content)
    with starts(model, tmp_path, tensor_parallel_size=2) as llm:
        assert ask(llm).num_cached_tokens == 0


def test_request_that_cannot_be_kept_is_refused(model: str, tmp_path: Path) -> None:
    """Without a folder, and with a value that is no switch."""
    with (
        engine(model, "h2o", {"budget": 64, "continuation": True}, **SMALL) as llm,
        pytest.raises(RefusedRequestError, match="the engine has no folder"),
    ):
        ask(llm, kv_save=1)
    with (
        starts(model, tmp_path) as llm,
        pytest.raises(RefusedRequestError, match="kv_save='manual' is not supported"),
    ):
        ask(llm, kv_save="manual")


def test_server_that_was_killed_answers_from_files(tmp_path: Path) -> None:
    """The page's commands; whoever has the answer finds the file, whatever then happens."""
    start, keep, later = blocks(ROOT / "examples/document.md")
    folder, model = tmp_path / "kept", smollm2()
    _, _, served, *flags = shlex.split(start.code.replace("/tmp/kept", str(folder)))
    assert served == MODEL
    flags += LONGER
    with Completing(Path(model), tmp_path / "first.log", flags) as server:
        run(keep, server)
        for process in (server.process, *server.children):
            os.kill(process.pid, signal.SIGKILL)
        server.process.wait()
    with Completing(Path(model), tmp_path / "second.log", flags) as server:
        said = re.findall(r"(\d+) tokens, (\d+) of them kept", run(later, server))
        prompts, kept = ([int(n) for n in each] for each in zip(*said, strict=True))
        assert len(said) == 3 and min(prompts) > min(kept) == max(kept) > 700
        assert server.metric("vllm:kv_policy_continuation_folder_hits_total") == sum(kept)
    assert "is kept in" in (tmp_path / "first.log").read_text()
    assert "1 prompts are kept" in (tmp_path / "second.log").read_text()
