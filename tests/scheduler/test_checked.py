# SPDX-License-Identifier: Apache-2.0
"""Files are checked in threads, and are open from the schedule of a step to its end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_h2o import files
from vllm_h2o.scheduler.checked import CheckedFiles


def write(folder: Path, content: bytes = b"a cache") -> Path:
    """A file whose name has its checksum."""
    written = folder / "any.part"
    written.write_bytes(content)
    return files.publish(written, str(folder / "doc"), 0, 1)


def known(checked: CheckedFiles, path: Path) -> bool:
    """Whether a file is whole, once that is known."""
    while (is_whole := checked.is_whole(path)) is None:
        checked.wait(10)
    return is_whole


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each file that was read."""
    counted: list[int] = []
    checksum = files.checksum
    monkeypatch.setattr(files, "checksum", lambda file: counted.append(1) or checksum(file))
    return counted


def test_file_is_read_once_unless_it_changes(tmp_path: Path, count: list[int]) -> None:
    """Also after it was opened, which notes the time."""
    checked, path = CheckedFiles(), write(tmp_path)
    count.clear()
    for _ in range(3):
        assert known(checked, path)
        assert checked.open([path])
        checked.keep(())
    assert len(count) == 1
    path.write_bytes(b"another")
    assert not known(checked, path) and not known(checked, path)
    assert len(count) == 2
    path.unlink()
    assert checked.is_whole(path) is False


def test_file_that_could_not_be_read_is_checked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a process has too many files open: that tells nothing about the file."""
    checked, path, checksum = CheckedFiles(), write(tmp_path), files.checksum
    failures = iter([OSError(24, "Too many open files")])

    def fails_once(file: Any) -> str:
        for error in failures:
            raise error
        return checksum(file)

    monkeypatch.setattr(files, "checksum", fails_once)
    assert not known(checked, path)
    assert checked.open([path]) is None
    assert known(checked, path) and checked.open([path])
    checked.keep(())


def replaced(path: Path) -> None:
    """Put another file of the same size in its place."""
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


@pytest.mark.parametrize("change", [Path.unlink, replaced, Path.touch])
def test_file_that_has_changed_since_its_check_is_not_opened(
    change: Callable[[Path], Any], tmp_path: Path
) -> None:
    """The descriptor is compared, not the name."""
    checked, path = CheckedFiles(), write(tmp_path)
    assert checked.open([path]) is None
    assert known(checked, path)
    change(path)
    assert checked.open([path]) is None
    assert checked.num_open == 0


def test_file_that_is_removed_is_read_until_its_step_has_ended(tmp_path: Path) -> None:
    """Two steps are in flight; what no step reads is closed when the step is scheduled."""
    checked, path = CheckedFiles(), write(tmp_path)
    assert known(checked, path)
    before = len(os.listdir("/proc/self/fd"))
    first = checked.open([path])
    assert first is not None and checked.open([path]) is first
    checked.keep({first, None, 3})
    second = checked.open([path])
    assert second is not None and second != first
    checked.keep({second})
    path.unlink()
    assert checked.open([path]) is None
    checked.keep(())
    assert checked.num_open == 2
    checked.close([3, None, first])
    assert Path(second[0]).read_bytes() == b"a cache"
    checked.close([second])
    assert checked.num_open == 0 and len(os.listdir("/proc/self/fd")) == before


def test_files_that_cannot_be_opened_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a process has too many; those that were opened before it are closed."""
    checked, path = CheckedFiles(), write(tmp_path)
    assert known(checked, path)
    assert checked.open([path, tmp_path / "none"]) is None
    before = len(os.listdir("/proc/self/fd"))

    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Path, "open", fail)
    assert checked.open([path]) is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_names_without_proc_are_those_of_the_files(tmp_path: Path) -> None:
    """And two steps that read one file do not close it twice."""
    checked, path = CheckedFiles(), write(tmp_path)
    checked._descriptors = None
    assert known(checked, path)
    for _ in range(2):
        assert checked.open([path]) == (str(path),)
        checked.keep({(str(path),)})
    checked.close([(str(path),)] * 2)
    assert checked.num_open == 0
