# SPDX-License-Identifier: Apache-2.0
"""Names of the files that keep a prompt's cache, one of each worker: no torch.

A file's name ends in a checksum of its bytes, and a file gets its name when it is whole. So what is
found by name is as it was written, whatever ended the process that wrote it.
"""

from __future__ import annotations

import os
import zlib
from functools import cache
from pathlib import Path

HEADER = "request"
"""Key of the header, JSON, in the metadata of a file (safetensors)."""
CHECKSUM = "[0-9a-f]" * 8
"""Pattern of the checksum that ends a name; a file that is being written has none."""
_READ_BYTES = 1 << 22


def is_as_written(path: Path) -> bool:
    """Whether a file has the checksum in its name; it is read once, unless it changes."""
    try:
        stat = path.stat()
        return _checksum(path, stat.st_size, stat.st_mtime_ns) == path.suffix[1:]
    except OSError:
        return False


def publish(written: Path, place: str, rank: int, num_workers: int) -> Path:
    """Give a file that is whole its name, unless the same worker of another engine has written one.

    Args:
        written: the file, in the same folder.
        place: the names' beginning: folder and name of the prompt.
        rank: of the worker.
        num_workers: of the engine.

    Returns:
        The file that is there.

    """
    for other in of_worker(place, rank, num_workers):
        if is_as_written(other):  # an engine may be about to read it
            written.unlink()
            return other
        other.unlink(missing_ok=True)
    with written.open("rb") as file:
        os.fsync(file.fileno())
    path = Path(f"{place}.{rank}-of-{num_workers}.{checksum(written)}")
    return written.replace(path)


def of_worker(place: str, rank: int, num_workers: int) -> list[Path]:
    """Find a worker's files by their name's beginning; there is one, or none."""
    path = Path(place)
    return sorted(path.parent.glob(f"{path.name}.{rank}-of-{num_workers}.{CHECKSUM}"))


def checksum(path: Path) -> str:
    """Return the CRC-32 of a file, in eight digits."""
    crc = 0
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            crc = zlib.crc32(part, crc)
    return f"{crc:08x}"


@cache
def _checksum(path: Path, size: int, modified: int) -> str:
    return checksum(path)
