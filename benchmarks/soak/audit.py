# SPDX-License-Identifier: Apache-2.0
"""Inside the server's engine process: pages and lengths are checked at every step.

vLLM loads what is installed under ``vllm.general_plugins`` in each of its processes. A folder with
nothing but this entry point, on the server's ``PYTHONPATH``, is such an installation.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import wraps
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from vllm_h2o.errors import IntegrityError
from vllm_h2o.scheduler.scheduler import HeavyHitterScheduler

NAME, FIGURES = "soak-audit", "figures.json"
EVERY = 200
"""Checks between two writings of the figures, while there are requests."""


@dataclass
class Figures:
    """Figures of the audit.

    Args:
        checks: times that all pages and lengths were counted.
        steps: steps scheduled.
        preempted: ids of requests that were thrown out, once for each time.
        resumed: of them, computed again with an eviction after each chunk.
        requests: that the scheduler knows now.
        free: pages, now.
        held: pages, now.
        total: pages of the pool without the null page.
        peak_held: most pages ever held.
        failure: what did not add up; empty when all did.

    """

    checks: int = 0
    steps: int = 0
    preempted: list[str] = field(default_factory=list)
    resumed: int = 0
    requests: int = 0
    free: int = 0
    held: int = 0
    total: int = 0
    peak_held: int = 0
    failure: str = ""


def plant(folder: Path) -> None:
    """Make ``folder`` the installation that has :func:`install` run in every process of a server.

    Args:
        folder: goes on the server's ``PYTHONPATH``; the figures appear in it.

    """
    info = folder / f"{NAME.replace('-', '_')}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{NAME} = {__name__}:{install.__name__}\n"
    )


def install() -> None:
    """Have the policy's scheduler watched; the figures go beside the entry point."""
    watch(HeavyHitterScheduler, Path(str(distribution(NAME).locate_file(FIGURES))))


def read(folder: Path) -> Figures:
    """The figures as they were last written into ``folder``; zeros before."""
    try:
        return Figures(**json.loads((folder / FIGURES).read_text()))
    except FileNotFoundError:
        return Figures()


def watch(scheduler: type[HeavyHitterScheduler], out: Path) -> None:
    """Check after each step, each output and each abort, and write the figures to ``out``."""
    figures = Figures()

    def preempting(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        figures.preempted.append(request.request_id)
        return preempt(self, request, *args, **kwargs)

    def scheduling(self: Any, *args: Any, **kwargs: Any) -> Any:
        figures.steps += 1
        output = schedule(self, *args, **kwargs)
        again = self.ledger.resumed.keys() & output.residency_plan.requests.keys()
        plans = [output.residency_plan.requests[request_id] for request_id in again]
        figures.resumed += sum(plan.logical_start == 0 for plan in plans)
        return output

    preempt, schedule = scheduler._preempt_request, scheduler.schedule
    replaced = {"_preempt_request": preempting, "schedule": scheduling}
    for name, method in replaced.items():
        setattr(scheduler, name, method)
    for name in ("schedule", "update_from_output", "finish_requests"):
        setattr(scheduler, name, _checked(getattr(scheduler, name), figures, out))


def _checked(method: Any, figures: Figures, out: Path) -> Any:
    @wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        try:
            self.check_integrity()
        except IntegrityError as error:
            figures.failure = str(error)
            raise
        finally:
            _count(self, figures, out)
        return result

    return checked


def _count(scheduler: HeavyHitterScheduler, figures: Figures, out: Path) -> None:
    manager = scheduler.block_manager
    pool, tables = manager.block_pool, manager.req_to_blocks.values()
    figures.checks += 1
    figures.requests = len(scheduler.requests)
    figures.free, figures.total = pool.get_num_free_blocks(), pool.num_gpu_blocks - 1
    held = {block.block_id for blocks in tables for block in blocks if not block.is_null}
    figures.held = len(held)
    figures.peak_held = max(figures.peak_held, figures.held)
    if figures.failure or not figures.requests or figures.checks % EVERY == 0:
        partial = out.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(figures)))
        partial.rename(out)
