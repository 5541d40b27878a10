# SPDX-License-Identifier: Apache-2.0
"""Names of the files that keep a prompt's cache, one of each worker: no torch.

A file's name ends in a checksum of its bytes, and a file gets its name when it is whole. So what is
found by name is as it was written, whatever ended the process that wrote it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

HEADER = "request"
"""Key of the header, JSON, in the metadata of a file (safetensors)."""
_READ_BYTES = 1 << 22


def checksum(path: Path) -> str:
    """Return the CRC-32 of a file, in eight digits."""
    crc = 0
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            crc = zlib.crc32(part, crc)
    return f"{crc:08x}"


def publish(written: Path, place: str, rank: int, num_workers: int) -> Path:
    """Give a file that is whole its name, instead of earlier ones of the same worker.

    Args:
        written: the file, in the same folder.
        place: the names' beginning: folder and name of the prompt.
        rank: of the worker.
        num_workers: of the engine.

    """
    with written.open("rb") as file:
        os.fsync(file.fileno())
    before = list(of_worker(place, rank, num_workers))
    path = Path(f"{place}.{rank}-of-{num_workers}.{checksum(written)}")
    written.replace(path)
    for other in before:
        if other != path:
            other.unlink(missing_ok=True)
    return path


def of_worker(place: str, rank: int, num_workers: int) -> Iterator[Path]:
    """Find a worker's files by their name's beginning; there is one, or none."""
    path = Path(place)
    return path.parent.glob(f"{path.name}.{rank}-of-{num_workers}.????????")
