# SPDX-License-Identifier: Apache-2.0
"""Random conversations of which files keep some."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from tests.scheduler.conversations import Talking
from vllm_h2o import files
from vllm_h2o.scheduler.checked import CheckedFiles


class WithFiles(Talking):
    """Every other request leaves files in the folder of the options, where some are lost."""

    asks_to_save = True
    loses = 0.02
    """How often a step loses one before it reads, and after it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pool.start = self._lose
        folder = self.scheduler.policy_config.continuation_folder
        assert folder is not None
        self.folder: Path = folder

    @property
    def checked(self) -> CheckedFiles:
        """Its files that were checked, and those that steps read."""
        folder = self.scheduler.folder
        assert folder is not None
        return folder.checked

    def step(self) -> SchedulerOutput:
        """One step, after which a file may be gone, or shorter than it was written."""
        output = super().step()
        self._lose(may_cut=True)
        plans = [each.residency_plan for each, _ in self.in_flight]
        read = {turn.place for plan in plans for turn in plan.continued.values()}
        assert self.checked.num_open == sum(isinstance(place, tuple) for place in read)
        return output

    def _lose(self, may_cut: bool = False) -> None:
        if self.random.random() < self.loses and (kept := sorted(self.folder.iterdir())):
            lost = self.random.choice(kept)
            if may_cut and self.random.random() < 0.5:
                os.truncate(lost, 3)
            else:
                lost.unlink()
            self.count["lose"] += 1


class LateChecks(Executor):
    """Ends checks of files when told to."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], None]] = []

    def submit(self, check: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Put a check off."""
        future: Future[Any] = Future()
        self._pending.append(lambda: future.set_result(check(*args, **kwargs)))
        return future

    def end(self) -> None:
        """End all checks that have begun."""
        for check in self._pending:
            check()
        self._pending.clear()


class WithLateChecks(WithFiles):
    """Checks of files end some steps after they have begun, the same in every run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.checked._threads = self.late = LateChecks()  # type: ignore[assignment]

    def step(self) -> SchedulerOutput:
        """One step, before which checks may end."""
        if self.random.random() < 0.4:
            self.late.end()
        output = super().step()
        self.count["wait"] += any(not c.done() for _, c in self.checked._checks.values())
        return output


class WithTiers(WithLateChecks):
    """Entries go from pages to host memory, and from there to a few files."""

    num_host_slots = 30
    asks_to_save = False
    most_bytes = 3_500
    """Of files; one has some 1,500."""

    def step(self) -> SchedulerOutput:
        """One step, after which there are few files."""
        output = super().step()
        self.count["return"] = self.pool.num_returned
        self.count["trim"] += files.trim(self.folder, self.most_bytes)
        return output
