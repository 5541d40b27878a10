# SPDX-License-Identifier: Apache-2.0
"""Names of the files that keep a prompt's cache, one of each worker: no torch.

A file's name ends in a checksum of its bytes, and a file gets its name when it is whole. So what is
found by name is as it was written, whatever ended the process that wrote it.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

HEADER = "request"
"""Key of the header, JSON, in the metadata of a file (safetensors)."""
CHECKSUM = "[0-9a-f]" * 8
"""Pattern of the checksum that ends a name; a file that is being written has none."""
_OF_ANY = re.compile(rf"\.\d+-of-\d+\.({CHECKSUM}|[0-9a-f]{{32}}\.part)$")
"""End of the name of any worker's file, and of one that is being written."""
_LONGEST_WRITE_NS = 600 * 10**9
"""Nanoseconds after which a file that is not finished belongs to an engine that has ended."""
MOST_WAITING = 1 << 30
"""Most bytes of caches that wait in a worker to be written while steps go on; more are lost."""
_READ_BYTES = 1 << 22


class Stamp(NamedTuple):
    """Tells what is in a file from what was, or will be, in it, without a look at it.

    Args:
        inode: number of the file.
        size: in bytes.
        modified: nanoseconds since 1970.

    """

    inode: int
    size: int
    modified: int


def stamp_of(file: Path | BinaryIO) -> Stamp:
    """Identify what is in a file now; raise OSError where it is gone."""
    stat = file.stat() if isinstance(file, Path) else os.fstat(file.fileno())
    return Stamp(stat.st_ino, stat.st_size, stat.st_mtime_ns)


def check(path: Path) -> Stamp | None:
    """Read a file, and compare it with the checksum in its name.

    Args:
        path: of the file.

    Returns:
        What was read; None: it is not as it was written, or changed meanwhile, or is gone.

    Raises:
        OSError: when it is there and cannot be read, which tells nothing about it.

    """
    try:
        with path.open("rb") as file:
            stamp = stamp_of(file)
            is_as_written = checksum(file) == path.suffix[1:] and stamp_of(file) == stamp
    except FileNotFoundError:
        return None
    return stamp if is_as_written else None


def touch(path: Path) -> None:
    """Note in a file's time of access that it was asked for; its stamp stays."""
    with suppress(OSError):  # a file of another user
        os.utime(path, ns=(time.time_ns(), stamp_of(path).modified))


def publish(
    written: Path, place: str, rank: int, num_workers: int, is_awaited: bool = True
) -> Path:
    """Give a file that is whole its name, unless the same worker of another engine has written one.

    Args:
        written: the file, in the same folder.
        place: the names' beginning: folder and name of the prompt.
        rank: of the worker.
        num_workers: of the engine.
        is_awaited: whether an answer says that it is there, whatever then happens to the machine.

    Returns:
        The file that is there.

    """
    for other in of_worker(place, rank, num_workers):
        if check(other):  # an engine may be about to read it
            touch(other)
            written.unlink()
            return other
        other.unlink(missing_ok=True)
    with written.open("rb") as file:
        if is_awaited:
            os.fsync(file.fileno())
        path = Path(f"{place}.{rank}-of-{num_workers}.{checksum(file)}")
    return written.replace(path)


def names(folder: Path, rank: int, num_workers: int) -> set[str]:
    """Find the names of all files of a worker in a folder; raise OSError where it has no list."""
    of_worker = re.compile(rf"\.{rank}-of-{num_workers}\.{CHECKSUM}$")
    return set(filter(of_worker.search, os.listdir(folder)))


def trim(folder: Path, most_bytes: int, needed: int = 0) -> int:
    """Remove files of the prompts that were asked for least recently, until there is room.

    Files of other engines count, too, and those that an engine which ended has not finished, but
    none that are being written. What an engine has left in part goes first.

    Args:
        folder: of the files; what else is there does not count, and stays.
        most_bytes: of all of them.
        needed: bytes of a file that is about to be written, also where the disk is full.

    Returns:
        Number of prompts whose files are removed.

    Raises:
        OSError: when there is no such folder.

    """
    found: dict[str, list[tuple[os.DirEntry[str], os.stat_result]]] = {}
    long_ago = time.time_ns() - _LONGEST_WRITE_NS
    with os.scandir(folder) as files:
        for file in files:
            if _OF_ANY.search(file.name):
                with suppress(FileNotFoundError):
                    stat = file.stat()
                    if not file.name.endswith(".part") or stat.st_mtime_ns < long_ago:
                        found.setdefault(file.name.partition(".")[0], []).append((file, stat))

    def used(name: str) -> int:
        """When a prompt was asked for, in nanoseconds since 1970; 0: no engine can use it."""
        num_workers = int(found[name][0][0].name.partition("-of-")[2].partition(".")[0])
        is_part = sum(not file.name.endswith(".part") for file, _ in found[name]) < num_workers
        if is_part and all(stat.st_mtime_ns < long_ago for _, stat in found[name]):
            return 0
        return max(stat.st_atime_ns for _, stat in found[name])

    sizes = {name: sum(stat.st_size for _, stat in each) for name, each in found.items()}
    free = shutil.disk_usage(folder).free
    num_gone, too_many = 0, needed - min(most_bytes - sum(sizes.values()), free)
    for name in sorted(found, key=used):
        if too_many <= 0:
            break
        with suppress(OSError):  # files of another user
            for file, _ in found[name]:
                Path(file.path).unlink(missing_ok=True)
            too_many -= sizes[name]
            num_gone += 1
    return num_gone


def of_worker(place: str, rank: int, num_workers: int) -> list[Path]:
    """Find a worker's files by their name's beginning; there is one, or none."""
    path = Path(place)
    return sorted(path.parent.glob(f"{path.name}.{rank}-of-{num_workers}.{CHECKSUM}"))


def checksum(file: BinaryIO) -> str:
    """Return the CRC-32 of what is left to read of a file, in eight digits."""
    crc = 0
    while part := file.read(_READ_BYTES):
        crc = zlib.crc32(part, crc)
    return f"{crc:08x}"
