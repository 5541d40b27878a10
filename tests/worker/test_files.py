# SPDX-License-Identifier: Apache-2.0
"""A copy that was written is read again, bit for bit; a file has its name when it is whole."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest
import torch

from vllm_h2o import files
from vllm_h2o.errors import IntegrityError
from vllm_h2o.kernels.held import Held
from vllm_h2o.wire import Saved
from vllm_h2o.worker.files import Writer, num_bytes, read, write


def copy(seed: int, dtype: torch.dtype = torch.float32, is_split: bool = False) -> Held:
    """Of eleven pages: K is a view into something larger."""
    torch.manual_seed(seed)
    key, value = torch.randn(2, 2, 11, 2, 8)[:, :, :, 1].to(dtype)
    position = torch.randint(99, (2, 11), dtype=torch.int32)
    parts = {"key": key, "value": value, "score": torch.rand(2, 11), "position": position}
    if is_split:
        parts["first_rows"], parts["victims"] = torch.tensor([[0, 3, 5]]), torch.tensor([[-1, 7]])
    return Held(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("is_split", [False, True])
def test_copies_are_read_as_they_were_written(
    is_split: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """More than ten layers, so that their order is not that of their names."""
    held = [copy(layer, dtype, is_split) for layer in range(12)]
    path = write(str(tmp_path / "doc"), 1, 2, held, "{}")
    assert path is not None and list(tmp_path.iterdir()) == [path]
    assert path.name.startswith("doc.1-of-2.")
    assert files.check(path) == files.stamp_of(path)
    for before, after in zip(held, read(str(path)), strict=True):
        assert before.parts.keys() == after.parts.keys()
        for name, part in before.parts.items():
            assert after.parts[name].dtype == part.dtype
            bits = (each.contiguous().view(torch.uint8) for each in (after.parts[name], part))
            assert torch.equal(*bits)


def test_first_file_that_is_whole_stays(tmp_path: Path) -> None:
    """Another engine may be about to read it; one that is cut is replaced."""
    place = str(tmp_path / "doc")
    for rank, seed in ((0, 1), (1, 1), (0, 2)):
        write(place, rank, 2, [copy(seed)], "{}")
    assert len(list(tmp_path.iterdir())) == 2
    (path,) = files.of_worker(place, 0, 2)
    (found,) = read(str(path))
    assert torch.equal(found.parts["key"], copy(1).parts["key"])
    os.truncate(path, 9)
    write(place, 0, 2, [copy(2)], "{}")
    (path,) = files.of_worker(place, 0, 2)
    (found,) = read(str(path))
    assert torch.equal(found.parts["key"], copy(2).parts["key"])


def test_file_that_is_being_written_is_none(tmp_path: Path) -> None:
    """However its name ends; what has no file's name is not touched."""
    others = [tmp_path / f"doc.0-of-2.{end}" for end in ("123.part", "00000000.part", "ABCDEFGH")]
    for path in others:
        path.write_bytes(b"a part")
    place = str(tmp_path / "doc")
    written = write(place, 0, 2, [copy(1)], "{}")
    assert files.of_worker(place, 0, 2) == [written]
    assert all(path.exists() for path in others)


def test_failures_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """To write is not needed by any request; to read is."""
    (tmp_path / "file").touch()
    for folder in ("none", "file"):  # and no folder
        place = str(tmp_path / folder / "doc")
        assert write(place, 0, 1, [copy(1)], "{}") is None
    assert write(place, 0, 1, [copy(1)], "{}") is None
    assert "a prompt's cache is not saved" in caplog.text
    with pytest.raises(IntegrityError, match="cannot be read"):
        read(place)


def test_time_of_access_is_noted_and_content_is_the_same(tmp_path: Path) -> None:
    """Whoever removes old files goes by that time; a check is not repeated for it."""
    path = write(str(tmp_path / "doc"), 0, 1, [copy(1)], "{}")
    assert path is not None
    os.utime(path, ns=(1, 1_700_000_000_123_456_789))
    stamp = files.stamp_of(path)
    with path.open("rb") as file:
        files.touch(path)
        assert path.stat().st_atime > 1_700_000_000
        assert files.stamp_of(path) == files.stamp_of(file) == stamp


@pytest.mark.parametrize("how", ["cut", "changed", "gone"])
def test_check_of_a_file_that_is_not_as_it_was_written_fails(how: str, tmp_path: Path) -> None:
    """The checksum is in the name."""
    path = write(str(tmp_path / "doc"), 0, 1, [copy(1)], "{}")
    assert path is not None
    if how == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif how == "changed":
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    else:
        path.unlink()
    assert files.check(path) is None


def written_at(folder: Path, name: str, time: int, num_ranks: int = 1) -> None:
    """A file of each rank, last asked for at a time."""
    for rank in range(num_ranks):
        path = write(str(folder / name), rank, num_ranks, [copy(1)], "{}")
        assert path is not None
        os.utime(path, ns=(time, path.stat().st_mtime_ns))


def test_files_that_were_used_least_recently_make_room(tmp_path: Path) -> None:
    """Those of all ranks together; what no engine has written does not count, and stays."""
    mine = tmp_path / "notes.0-of-1.txt"
    mine.write_bytes(bytes(10_000))
    for name, time in (("new", 30), ("old", 10), ("older", 5)):
        written_at(tmp_path, name, time, 2 if name == "old" else 1)
    size = files.of_worker(str(tmp_path / "new"), 0, 1)[0].stat().st_size
    assert files.trim(tmp_path, 4 * size) == 0
    assert files.trim(tmp_path, 4 * size, needed=size) == 1
    assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == {"new", "old", "notes"}
    assert files.trim(tmp_path, 3 * size - 1) == 1
    assert files.trim(tmp_path, 0) == 1 and [*tmp_path.iterdir()] == [mine]
    with pytest.raises(FileNotFoundError):
        files.trim(tmp_path / "none", 0)


def test_what_an_engine_left_in_part_makes_room_first(tmp_path: Path) -> None:
    """A file that was never finished, and one of two ranks; not what is being written."""
    for end in "01":
        (tmp_path / f"odd{end}.0-of-1.{end * 32}.part").write_bytes(bytes(99))
    written_at(tmp_path, "old", 10)
    lonely = write(str(tmp_path / "lonely"), 1, 2, [copy(1)], "{}")
    assert lonely is not None
    for path in (lonely, tmp_path / f"odd0.0-of-1.{'0' * 32}.part"):
        os.utime(path, ns=(10**18 * 9, 1))
    size = files.of_worker(str(tmp_path / "old"), 0, 1)[0].stat().st_size
    assert files.trim(tmp_path, size) == 2
    assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == {"old", "odd1"}


def test_full_disk_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much all files may be."""
    for name, time in (("new", 30), ("old", 10)):
        written_at(tmp_path, name, time)
    disk = SimpleNamespace(free=1_000)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: disk)
    assert files.trim(tmp_path, 10**9, needed=1_000) == 0
    assert files.trim(tmp_path, 10**9, needed=1_001) == 1
    assert files.of_worker(str(tmp_path / "new"), 0, 1)


LATE = [Saved(name, (1,), header="{}") for name in "abcde"]


def test_only_an_answer_waits_for_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others are written in their order, some at a time; one worker removes what is too much."""
    caplog.set_level(logging.INFO, "vllm.kv_policy")
    may_end, checksum = threading.Event(), files.checksum
    late = [replace(saved, place=str(tmp_path / str(saved.place))) for saved in LATE]

    def wait(file: BinaryIO) -> str:
        assert threading.current_thread() is threading.main_thread() or may_end.wait(60)
        return checksum(file)

    monkeypatch.setattr(files, "checksum", wait)
    monkeypatch.setattr(files, "MOST_WAITING", 3 * num_bytes([copy(1)]))
    writer, other = Writer(0, 1, 5_000), Writer(1, 2, 5_000)
    for saved in late[:4]:
        writer.write(saved, [copy(1)])
    assert "some caches are lost" in caplog.text
    writer.write(replace(late[4], is_awaited=True), [copy(1)])
    assert [path.name[0] for path in tmp_path.iterdir() if path.suffix != ".part"] == ["e"]
    may_end.set()
    writer.wait()
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["b", "c"]
    assert caplog.text.count("files of 1 prompts are removed for others") == 2
    other.write(replace(late[0], is_awaited=True), [copy(1)])
    assert len([*tmp_path.iterdir()]) == 3


def test_failures_of_late_files_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is larger than all files may be, and a folder that is gone: nothing else is removed."""
    written_at(tmp_path, "old", 10)
    for folder, most_bytes, says in (
        (tmp_path, 99, "is larger than all of"),
        (tmp_path / "none", 10_000, "is not saved to"),
    ):
        writer = Writer(0, 1, most_bytes)
        writer.write(replace(LATE[0], place=str(folder / "a")), [copy(1)])
        writer.wait()
        assert says in caplog.text
    assert len([*tmp_path.iterdir()]) == 1
