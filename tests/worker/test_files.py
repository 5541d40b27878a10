# SPDX-License-Identifier: Apache-2.0
"""A copy that was written is read again, bit for bit; a file has its name when it is whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from vllm_h2o import files
from vllm_h2o.errors import IntegrityError
from vllm_h2o.kernels.held import Held
from vllm_h2o.worker.files import read, write


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
