# SPDX-License-Identifier: Apache-2.0
"""A copy that was written is read again, bit for bit; a file has its name when it is whole."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from vllm_h2o import files
from vllm_h2o.errors import IntegrityError
from vllm_h2o.kernels.held import Held
from vllm_h2o.wire import Saved
from vllm_h2o.worker.files import MOST_WAITING, Writer, read, write


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
    for end in "01":
        (tmp_path / f"odd.0-of-1.{end * 32}.part").write_bytes(bytes(99))
    unfinished = tmp_path / f"odd.0-of-1.{'0' * 32}.part"
    os.utime(unfinished, ns=(1, 1))
    size = files.of_worker(str(tmp_path / "new"), 0, 1)[0].stat().st_size
    assert files.trim(tmp_path, 4 * size + 99) == 0
    assert files.trim(tmp_path, 4 * size) == 1 and not unfinished.exists()
    assert files.trim(tmp_path, 3 * size - 1) == 2
    assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == {"new", "notes", "odd"}
    assert files.trim(tmp_path, 0) == 1 and len([*tmp_path.iterdir()]) == 2 and mine.exists()
    assert files.trim(tmp_path / "none", 0) == 0


def test_only_an_answer_waits_for_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others are written in their order, a few at a time; one worker removes what is too much."""
    caplog.set_level(logging.INFO, "vllm.kv_policy")
    may_end, names = threading.Event(), [str(tmp_path / name) for name in "abcd"]
    late = [Saved(name, (1,), header="{}") for name in names]
    checksum = files.checksum

    def wait(file: BinaryIO) -> str:
        assert threading.current_thread() is threading.main_thread() or may_end.wait(60)
        return checksum(file)

    monkeypatch.setattr(files, "checksum", wait)
    writer, other = Writer(0, 1, 5_000), Writer(1, 2, 1)
    for saved in late[:MOST_WAITING]:
        writer.write(saved, [copy(1)])
    writer.write(replace(late[3], is_awaited=True), [copy(1)])
    found = [path.name[0] for path in tmp_path.iterdir() if path.suffix != ".part"]
    assert found == ["d"]
    threading.Timer(0.05, may_end.set).start()
    writer.write(late[2], [copy(1)])
    writer._thread.shutdown()
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["b", "c"]
    assert caplog.text.count("files of 1 prompts are removed for others") == 2
    other.write(replace(late[0], is_awaited=True), [copy(1)])
    assert len([*tmp_path.iterdir()]) == 3
