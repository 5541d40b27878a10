# SPDX-License-Identifier: Apache-2.0
"""Knows the prompts whose caches are kept in a folder, by this engine or by others.

The scheduler names a prompt's files and says what is in them; each worker writes its own. A file
is known by what it says: of another model, other options or another version it is not looked at
again. It is used when the files of all workers are there and are as they were written (checked.py).

Engines may share a folder, one after the other or at once: what one has written, the others find.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Container, Iterator, Mapping, Set
from pathlib import Path

from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_h2o import files
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.scheduler.checked import CheckedFiles, Names
from vllm_h2o.scheduler.kept import Kept, read_kept
from vllm_h2o.scheduler.origin import made_by
from vllm_h2o.wire import Continuation, ResidencyPlan, Saved

logger = init_logger("vllm.kv_policy")

COARSE_NS = 2_000_000_000
"""Nanoseconds within which two changes of a folder may have the same time."""
MOST_LATE = 16
"""Most caches that memory drops and a step sends to files: each is named by all of its tokens."""
LATEST = 60.0
"""Seconds within which files come that no answer waits for, if they come."""
PATIENCE = 0.2
"""Seconds for which a step waits until the last worker has written its file."""
OTHERS = "another model, policy or version, and not read"
"""Origin of a file that this engine cannot use, in words."""


class Folder:
    """The files of prompts that requests asked to keep.

    Args:
        path: of the folder, which exists.
        made_by: what computes caches: only those of the same model, options and versions are used.
        num_workers: of the engine, each with a file of its own.
        most_late_pages: most pages of caches that a step copies because the pool drops them; 0:
            none that memory drops is written.

    Attributes:
        made_by: as given.
        checked: its files that were checked, and those that steps read.
        unwritten: places of the files that are not written yet, by the request that asked for them.
        num_saved: caches that steps have sent to files since the last report.
        num_gone: prompts whose files were found to be gone since then.

    """

    def __init__(
        self, path: Path, made_by: str, num_workers: int, most_late_pages: int = 0
    ) -> None:
        self._path = path
        self.made_by = made_by
        self._num_workers = num_workers
        self._most_late_pages = most_late_pages
        self._num_late = self._num_late_pages = self.num_saved = self.num_gone = 0
        self.checked = CheckedFiles()
        self.unwritten: dict[str, str] = {}
        self._saved: dict[str, Saved] = {}
        self._saved_for: set[str] = set()
        self._found: dict[str, list[list[Path]]] = {}
        self._seen: dict[str, str] = {}  # places by names
        self._unread: deque[str] = deque()
        self._named: set[str] = set()
        self._late: dict[str, float] = {}
        self._changed = self._seen_until = 0
        self._reads, self._is_read = True, False
        self._has_looked = False

    def read(self) -> Iterator[Kept]:
        """Read what is there when the engine starts; the log says how much, and what it is not."""
        num_kept = 0
        self.look()
        self._has_looked = False
        for kept in self.read_new():
            num_kept += 1
            yield kept
        num_other = len(self._seen) - num_kept
        logger.info(
            "%s: %d prompts are kept; %d files are of %s", self._path, num_kept, num_other, OTHERS
        )

    def look(self) -> Set[str]:
        """See what is new in the folder, and what is gone, unless the folder is as it was.

        A file's system may tell times apart by some milliseconds only. A large folder takes
        milliseconds, so a step looks once, however many requests ask.

        Returns:
            Places of the prompts whose files are gone.

        """
        if self._has_looked:
            return frozenset()
        self._has_looked = True
        try:
            changed, now = self._path.stat().st_mtime_ns, time.time_ns()
            if changed == self._changed and changed < self._seen_until:
                return frozenset()
            names = files.names(self._path, 0, self._num_workers)
        except OSError:
            return frozenset()
        self._changed, self._seen_until = changed, now - COARSE_NS
        known, until = {*self._seen.values(), *self._named}, time.monotonic()
        own = {name: self._place(name) for name in names}
        places = set(own.values())
        self._late = {p: t for p, t in self._late.items() if t > until and p not in places}
        gone = known.difference(places, self.unwritten.values(), self._late)
        self._named -= gone
        for place in gone:
            self._found.pop(place, None)
        self.checked.forget(gone)
        self._unread += sorted(own.keys() - self._seen.keys()) if self._reads else []
        self._seen = own
        return gone

    def _place(self, name: str) -> str:
        """Where the files are, of which one has this name."""
        return f"{self._path}/{name.partition('.')[0]}"

    def read_new(self) -> Iterator[Kept]:
        """Read what others have written since the last :meth:`look`."""
        while self._unread:
            name = self._unread.popleft()
            place = self._place(name)
            if place in self._named:
                continue
            if kept := read_kept(self._path / name, place, self.made_by):
                yield kept
            elif self._is_read:
                logger.warning_once("%s: a file is of %s", self._path, OTHERS)
        self._is_read = True

    @property
    def takes_dropped(self) -> bool:
        """Whether caches that memory drops are written, and found again."""
        return self._most_late_pages > 0 and self._reads

    def save(self, kept: Kept, source: tuple[int, ...], request_id: str) -> str:
        """Have a cache written before the next step, unless its files are known to be there.

        Where they are not checked yet, each worker finds its own when it has written another.

        Args:
            kept: what the files say.
            source: ids of its blocks.
            request_id: of the request whose answer waits for them.

        Returns:
            The beginning of its files' names.

        """
        place, header = self._named_by(kept)
        self._saved_for.add(request_id)
        if self.is_whole(place):
            self.touch(place)
        else:
            self._saved[place] = Saved(place, source, kept.turn.num_used, header, is_awaited=True)
            self._named.add(place)
            self.unwritten[request_id] = place
        return place

    def take_saved(self, request_id: str) -> bool:
        """Whether a request was saved that ends now; it is asked once."""
        is_saved = request_id in self._saved_for
        self._saved_for.discard(request_id)
        return is_saved

    def save_late(self, kept: Kept, source: tuple[int, ...] | int) -> str | None:
        """Have a cache written that memory drops, while steps go on: some in each step.

        Args:
            kept: what the files say.
            source: ids of its blocks, or its number in host memory.

        Returns:
            The beginning of its files' names; None: it is not written, for others are.

        """
        pages = 0 if isinstance(source, int) else len(source)
        if self._num_late == MOST_LATE or self._num_late_pages + pages > self._most_late_pages:
            return None
        place, header = self._named_by(kept)
        if place in self._found and self.is_whole(place):
            self.touch(place)
        elif place not in self._saved:
            self._num_late, self._num_late_pages = self._num_late + 1, self._num_late_pages + pages
            self._saved[place] = Saved(place, source, kept.turn.num_used if pages else 0, header)
            self._named.add(place)
            self._late[place] = time.monotonic() + LATEST
        return place

    def touch(self, place: str) -> None:
        """Note that files were asked for, if a request has continued from them or may."""
        for paths in self._found.get(place, ()):
            for path in paths:
                files.touch(path)

    def _named_by(self, kept: Kept) -> tuple[str, str]:
        """The beginning of a cache's files' names, and their header."""
        header = kept.header(self.made_by)
        return str(self._path / hashlib.sha256(header.encode()).hexdigest()[:32]), header

    def end(self, plan: ResidencyPlan) -> None:
        """End a step: close what it read, and wait until each worker has written its files.

        All workers have read theirs: the tokens of such a step depend on each of them.
        """
        self.checked.close(each.place for each in plan.continued.values())
        places = {str(each.place) for each in plan.saved if each.is_awaited}
        until = time.monotonic() + PATIENCE
        while not all(map(self._is_written, places)) and time.monotonic() < until:
            time.sleep(0.001)
        self._forget(places)
        for place in places:  # checked before it is asked for
            self.is_whole(place)

    def _forget(self, places: Container[object]) -> None:
        for request in [r for r, place in self.unwritten.items() if place in places]:
            del self.unwritten[request]

    def _is_written(self, place: str) -> bool:
        if self._num_workers == 1:
            return True  # its answer has ended the step
        ranks = range(self._num_workers)
        return all(files.of_worker(place, rank, self._num_workers) for rank in ranks)

    def is_whole(self, place: str) -> bool | None:
        """Whether every worker's file is there, as it was written; None: one is being checked."""
        is_whole = self._is_each_whole(self._found.get(place, [[]]))
        if is_whole is False:
            ranks = range(self._num_workers)
            each = [files.of_worker(place, rank, self._num_workers) for rank in ranks]
            is_whole = self._is_each_whole(each)
            if is_whole is False:
                self._found.pop(place, None)
            else:
                self._found[place] = each
        return is_whole

    def _is_each_whole(self, each: list[list[Path]]) -> bool | None:
        """Whether one of each worker's files is whole; it has one, as a rule."""
        is_whole: bool | None = True
        for paths in each:
            known = set(map(self.checked.is_whole, paths))
            if True not in known:
                is_whole = None if None in known and is_whole is not False else False
        return is_whole

    def open(self, place: str) -> Names | None:
        """Open the files of all workers for the step that is being scheduled.

        Args:
            place: beginning of their names.

        Returns:
            Names by which the workers open them; None: not all of them are known to be whole.

        """
        if not self.is_whole(place):
            return None
        whole = [next(filter(self.checked.is_whole, each), None) for each in self._found[place]]
        paths = [path for path in whole if path is not None]
        return self.checked.open(paths) if len(paths) == self._num_workers else None

    def keep_open(self, continued: Mapping[str, Continuation]) -> None:
        """Hold open what a step reads until it has ended, and nothing else; the next looks anew."""
        self.checked.keep({each.place for each in continued.values()})
        self._has_looked = False

    def forget(self) -> None:
        """Have nothing written that is not written yet, and read no more of what others write."""
        if self._reads:
            logger.warning(
                "%s: no file is read until the engine starts again, and only what requests ask for "
                "is written",
                self._path,
            )
        self._reads = False
        self._unread.clear()
        if num_asked := sum(saved.is_awaited for saved in self._saved.values()):
            logger.warning("%d prompts are not kept: the cache was reset first", num_asked)
        self._forget(self._saved)
        self._saved.clear()
        self._late.clear()

    def take(self) -> tuple[Saved, ...]:
        """Take what a step writes."""
        saved = tuple(self._saved.values())
        self.num_saved += len(saved)
        self._num_late = self._num_late_pages = 0
        self._saved.clear()
        return saved

    def take_counts(self) -> dict[str, int]:
        """Take the counts since the last report, by field of ``PolicyStats``."""
        saved, gone = self.num_saved, self.num_gone
        self.num_saved = self.num_gone = 0
        return {"continuation_folder_saves": saved, "continuation_folder_drops": gone}


def folder_of(vllm_config: VllmConfig, config: KVPolicyConfig, page_bytes: int) -> Folder | None:
    """The folder that the options name, which exists by now; None: they name none.

    Args:
        vllm_config: of the engine.
        config: the policy's.
        page_bytes: of a page of all layers of a worker.

    """
    path = config.continuation_folder
    if path is None:
        return None
    num_workers = vllm_config.parallel_config.world_size
    most_bytes = min(config.continuation_folder_bytes, files.MOST_WAITING)
    return Folder(path, made_by(vllm_config, config), num_workers, most_bytes // page_bytes)
