# SPDX-License-Identifier: Apache-2.0
"""Checks files in threads, and holds open those that steps read: no torch.

A check reads a whole file, which may take seconds, so no step waits for it. A step reads what was
checked: when it is scheduled the file is opened, and compared with what the check has read. Workers
open it again by its descriptor in this process, so it may be removed meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from vllm_h2o import files
from vllm_h2o.files import Stamp

NUM_THREADS = 4
"""Most files that are checked at once."""

Names = tuple[str, ...]
"""Names of open files, one of each worker."""


class CheckedFiles:
    """The files that were checked, or are being checked, and those that steps read."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "kv-policy-check")
        self._checks: dict[Path, tuple[Stamp, Future[Stamp | None]]] = {}
        self._opened: dict[tuple[Path, ...], tuple[Names, ExitStack]] = {}
        self._read: dict[Names, ExitStack] = {}
        descriptors = Path(f"/proc/{os.getpid()}/fd")
        self._descriptors = descriptors if descriptors.is_dir() else None

    @property
    def num_open(self) -> int:
        """Files that are open for steps."""
        return sum(map(len, (*(names for names, _ in self._opened.values()), *self._read)))

    def is_whole(self, path: Path) -> bool | None:
        """Whether a file is as it was written; None: its check has begun, or goes on.

        A file that could not be read is checked anew when it is asked for again.
        """
        try:
            stamp = files.stamp_of(path)
        except OSError:
            self._checks.pop(path, None)
            return False
        begun, check = self._checks.get(path, (None, None))
        if check is not None and not check.done():
            return None
        if check is not None and check.exception():
            del self._checks[path]
            return False
        if check is not None and check.result() == stamp:
            return True
        if begun == stamp:
            return False
        self._checks[path] = stamp, self._threads.submit(files.check, path)
        return None

    def wait(self, seconds: float) -> None:
        """Wait until a check ends, or for some seconds."""
        running = [check for _, check in self._checks.values() if not check.done()]
        wait(running, seconds, FIRST_COMPLETED)

    def open(self, paths: Sequence[Path]) -> Names | None:
        """Open files for the step that is being scheduled.

        Args:
            paths: of files that were checked, one of each worker.

        Returns:
            Names by which workers open them; None: one is gone, or has changed since.

        """
        if opened := self._opened.get(tuple(paths)):
            return opened[0]
        with ExitStack() as stack:
            try:
                found = [stack.enter_context(path.open("rb")) for path in paths]
                if not all(map(self._was_checked, paths, found)):
                    return None
            except OSError:
                return None
            names = tuple(map(self._name, found))
            self._opened[tuple(paths)] = names, stack.pop_all()
            return names

    def _was_checked(self, path: Path, file: BinaryIO) -> bool:
        _, check = self._checks.get(path, (None, None))
        is_read = check is not None and check.done() and not check.exception()
        return check is not None and is_read and check.result() == files.stamp_of(file)

    def _name(self, file: BinaryIO) -> str:
        """The name by which other processes open a file; where there is no /proc, its own."""
        return str(self._descriptors / str(file.fileno()) if self._descriptors else file.name)

    def keep(self, read: Container[object]) -> None:
        """Hold open what a step reads until it has ended, and close the rest.

        Args:
            read: names of the files that the step reads.

        """
        for paths, (names, stack) in self._opened.items():
            if names in read:
                for path in paths:
                    files.touch(path)
                self._read.setdefault(names, ExitStack()).callback(stack.close)
            else:
                stack.close()
        self._opened.clear()

    def close(self, read: Iterable[object]) -> None:
        """Close what a step has read; names of other things are passed over."""
        for names in read:
            if isinstance(names, tuple) and names in self._read:
                self._read.pop(names).close()

    def forget(self, places: Container[str]) -> None:
        """Forget the checks of files that are gone, by their names' beginning."""
        for path in list(self._checks):
            if f"{path.parent}/{path.name.partition('.')[0]}" in places:
                del self._checks[path]

    def shut_down(self) -> None:
        """Begin no more checks, because the engine ends."""
        self._threads.shutdown(wait=False, cancel_futures=True)
