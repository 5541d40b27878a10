# SPDX-License-Identifier: Apache-2.0
"""The book of a folder's files, without an engine: which are whole, known, late or gone."""

from __future__ import annotations

import logging
import os
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.scheduler.harness import vllm_config
from tests.scheduler.schedules import Option
from vllm_h2o import files
from vllm_h2o.kernels.held import Held
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.policy import Budget
from vllm_h2o.scheduler.folder import Folder
from vllm_h2o.scheduler.kept import Kept
from vllm_h2o.scheduler.origin import made_by
from vllm_h2o.scheduler.state import Left
from vllm_h2o.worker.files import write

KEPT = Kept("", array("i", range(40)), "salt", Budget(16, 8, 7, 0), Left(40, 16, prompt=(0, 30)))


def kept(path: Path, made_by: str = "me", num_workers: int = 2) -> tuple[Folder, str]:
    """A folder with a prompt of which no worker has written anything, and its files' place."""
    folder = Folder(path, made_by, num_workers)
    place = folder.save(KEPT, (3, 4), "r")
    (saved,) = folder.take()
    assert (saved.place, saved.source, saved.num_used) == (place, (3, 4), 16)
    assert folder.take() == ()
    for rank in range(num_workers):
        assert folder.is_whole(place) is False
        write(place, rank, num_workers, [Held({"score": torch.zeros(9)})], saved.header)
    return folder, place


@pytest.mark.parametrize(
    ("options", "is_same"),
    [
        ((("continuation", "/a/folder"),), True),
        ((("num_sink_tokens", 1),), False),
        ((("name", "streaming"),), False),
    ],
)
def test_caches_are_named_by_the_policy(options: tuple[Option, ...], is_same: bool) -> None:
    """Where they are kept does not matter."""
    configs = [vllm_config(12, 64, 8, "fcfs", False, each) for each in ((), options)]
    one, two = (made_by(config, KVPolicyConfig.required(config)) for config in configs)
    assert (one == two) is is_same


def is_whole(folder: Folder, place: str) -> bool:
    """Whether all files are as they were written, once that is known."""
    while (known := folder.is_whole(place)) is None:
        folder.checked.wait(10)
    return known


def test_every_worker_has_to_write(tmp_path: Path) -> None:
    """What is known to be there is not written again."""
    folder, place = kept(tmp_path)
    assert folder.save(KEPT, (3, 4), "r") == place
    assert len(folder.take()) == 1
    assert is_whole(folder, place)
    for path in tmp_path.iterdir():
        os.utime(path, ns=(1, path.stat().st_mtime_ns))
    assert folder.save(KEPT, (3, 4), "r") == place
    assert folder.take() == ()
    assert all(path.stat().st_atime > 1 for path in tmp_path.iterdir())
    (later,) = Folder(tmp_path, "me", 2).read()
    assert later == replace(KEPT, place=place)


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
    assert not is_whole(folder, place)
    assert folder.open(place) is None


def test_each_worker_is_told_its_own_file(tmp_path: Path) -> None:
    """In the order of ranks."""
    folder, place = kept(tmp_path)
    assert is_whole(folder, place)
    names = folder.open(place)
    assert names is not None
    found = [Path(os.readlink(name)) for name in names]
    assert found == [files.of_worker(place, rank, 2)[0] for rank in range(2)]
    folder.keep_open({})
    assert folder.checked.num_open == 0


def test_reading_what_is_there_is_no_use_of_it(tmp_path: Path) -> None:
    """An engine that starts leaves the order in which files make room."""
    kept(tmp_path)
    for path in tmp_path.iterdir():
        os.utime(path, ns=(5, path.stat().st_mtime_ns))
    assert len(list(Folder(tmp_path, "me", 2).read())) == 1
    assert all(path.stat().st_atime_ns == 5 for path in tmp_path.iterdir())


def test_step_sends_some_of_what_memory_drops(tmp_path: Path) -> None:
    """By their number, and by the pages that are copied; the next step sends others."""
    folder = Folder(tmp_path, "me", 1, most_late_pages=3)
    assert folder.takes_dropped and not Folder(tmp_path, "me", 1).takes_dropped
    each = [replace(KEPT, salt=str(number)) for number in range(40)]
    assert folder.save_late(each[0], (1, 2)) and not folder.save_late(each[1], (3, 4))
    first = folder.save_late(each[2], 7)
    (_, saved) = folder.take()
    assert (saved.place, saved.source, saved.num_used, saved.is_awaited) == (first, 7, 0, False)
    assert folder.save_late(each[1], (3, 4))
    assert sum(folder.save_late(kept, 7) is not None for kept in each[3:]) == 15
    assert folder.take_counts()["continuation_folder_saves"] == 2
    folder.forget()
    assert folder.take() == () and not folder.takes_dropped


def test_late_file_is_gone_when_it_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was lost on the way; until then it is waited for, and may be found by any step."""
    folder = Folder(tmp_path, "me", 1, most_late_pages=3)
    place = folder.save_late(KEPT, (1, 2))
    lost = folder.save_late(replace(KEPT, salt=None), 7)
    assert place and lost and folder.look() == set()
    (saved, _) = folder.take()
    write(place, 0, 1, [Held({"score": torch.zeros(9)})], saved.header)
    folder.keep_open({})
    assert folder.look() == set() and is_whole(folder, place)
    monkeypatch.setattr("vllm_h2o.scheduler.folder.LATEST", 0)
    other = folder.save_late(replace(KEPT, salt="b"), 7)
    (tmp_path / "anything").touch()
    folder.keep_open({})
    assert folder.look() == {other}
