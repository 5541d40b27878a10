# SPDX-License-Identifier: Apache-2.0
"""The soak's audit, on a real scheduler, and its verdict: both find what does not add up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from importlib.metadata import DistributionFinder, MetadataPathFinder
from pathlib import Path

import pytest

from benchmarks.soak import audit
from benchmarks.soak.__main__ import MODES, SHORT, Report
from benchmarks.soak.audit import Figures
from benchmarks.soak.canaries import CANARIES
from benchmarks.soak.chaos import Death, Witness
from benchmarks.soak.load import Outcome
from benchmarks.soak.verdict import MIB
from tests.scheduler import harness
from vllm_h2o.errors import IntegrityError
from vllm_h2o.scheduler.scheduler import HeavyHitterScheduler


@pytest.fixture
def simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> harness.Simulation:
    """A pool for two of four requests, with a scheduler that is watched."""

    class Watched(HeavyHitterScheduler):
        """A class of its own: the audit changes the class that it watches."""

    audit.watch(Watched, tmp_path / audit.FIGURES)
    monkeypatch.setattr(harness, "HeavyHitterScheduler", Watched)
    config = harness.vllm_config(24, 64, 8, "fcfs", async_scheduling=False)
    simulation = harness.Simulation(config, 14, depth=1)
    for _ in range(4):
        simulation.add(prompt_len=9, max_tokens=30)
    return simulation


def test_report_counts_steps_preemptions_and_pages(
    simulation: harness.Simulation, tmp_path: Path
) -> None:
    """Steps, preemptions, and the pages at the end."""
    assert audit.read(tmp_path) == audit.Figures()
    simulation.drain()
    figures = audit.read(tmp_path)
    assert figures.steps > 0 and figures.checks == 2 * figures.steps
    assert len(figures.preempted) == simulation.count["preempt"] > 0
    assert set(figures.preempted) <= {"r0", "r1", "r2", "r3"}
    assert (figures.requests, figures.held, figures.free, figures.total) == (0, 0, 13, 13)
    assert 0 < figures.peak_held <= 13 and not figures.failure


def test_it_counts_after_an_abort(simulation: harness.Simulation, tmp_path: Path) -> None:
    """The last that happens may be a client that leaves."""
    simulation.step()
    simulation.abort(["r0", "r1", "r2", "r3"])
    assert audit.read(tmp_path).free == 13


def test_a_lost_page_stops_the_engine(simulation: harness.Simulation, tmp_path: Path) -> None:
    """And is in the figures."""
    simulation.step()
    simulation.scheduler.block_manager.req_to_blocks["r0"].pop()
    with pytest.raises(IntegrityError, match="held of 13"):
        simulation.step()
    assert "held of 13" in audit.read(tmp_path).failure


def test_vllm_finds_its_entry_point(tmp_path: Path) -> None:
    """The planted folder is an installation with one general plugin."""
    audit.plant(tmp_path)
    (found,) = MetadataPathFinder.find_distributions(
        DistributionFinder.Context(name=audit.NAME, path=[str(tmp_path)])
    )
    (entry,) = found.entry_points
    assert entry.group == "vllm.general_plugins" and entry.load() is audit.install
    assert Path(str(found.locate_file(audit.FIGURES))) == tmp_path / audit.FIGURES


DEATH = Death(streams=("error 500",), whole="500", later="refused", exit_code=1)
OUTCOME = Outcome(
    Counter({("whole", "answered"): 500}),
    canaries=[(f"canary-{i}-", CANARIES[i % 7].name, True) for i in range(21)],
    memory=[(n, {"engine": 300 * MIB + n % 2}) for n in range(0, 500, 10)],
)
FIGURES = Figures(checks=20, steps=10, preempted=["cmpl-x"], free=9, total=9, peak_held=9)
GOOD = Report(
    SHORT,
    "prompt_end",
    "h2o",
    OUTCOME,
    FIGURES,
    0.0,
    0.0,
    {"worker": (Witness(DEATH, ["w1"]), Witness(DEATH, []))},
    "w1 w2",
)


def test_a_good_run_is_good() -> None:
    """The report that the next tests change has no fault."""
    assert not list(GOOD.faults())


def test_a_preempted_canary_may_differ() -> None:
    """It is told by its id, and is not compared."""
    first, *others = OUTCOME.canaries
    outcome = replace(OUTCOME, canaries=[("canary-0-", first[1], False), *others * 2])
    preempted = replace(FIGURES, preempted=["cmpl-canary-0--0-1f"])
    assert not list(replace(GOOD, outcome=outcome, figures=preempted).faults())
    assert list(replace(GOOD, outcome=outcome).faults())


@pytest.mark.parametrize(
    ("bad", "start"),
    [
        (
            {"outcome": {"memory": [(n, {"engine": 2 * n * MIB}) for n in range(99)]}},
            "engine gains 2000",
        ),
        (
            {"outcome": {"canaries": [(i, n, n[0] != "p") for i, n, _ in OUTCOME.canaries]}},
            "canary 'past",
        ),
        ({"outcome": {"canaries": OUTCOME.canaries[:20]}}, "canary 'tool call': 2 of 2"),
        ({"outcome": {"surprises": ["whole: 500"]}}, "whole: 500"),
        ({"outcome": {"counts": Counter({("whole", "answered"): 5})}}, "5 requests, at least"),
        ({"figures": {"free": 8}}, "0 requests, 0 pages held and 8 of 9 free"),
        ({"figures": {"held": 1}}, "0 requests, 1 pages held"),
        ({"figures": {"requests": 1}}, "1 requests"),
        ({"figures": {"failure": "pages: 1"}}, "pages: 1"),
        ({"figures": {"checks": 9}}, "9 checks in 10 steps"),
        ({"figures": {"checks": 0, "steps": 0}}, "0 checks in 0 steps"),
        ({"figures": {"preempted": []}}, "nothing was preempted"),
    ],
)
def test_a_fault_is_found(bad: dict[str, dict[str, object]], start: str) -> None:
    """Each, one at a time, in what was a good run."""
    changed = {part: replace(getattr(GOOD, part), **values) for part, values in bad.items()}
    (fault,) = replace(GOOD, **changed).faults()
    assert fault.startswith(start)


@pytest.mark.parametrize(
    ("ours", "stock", "start"),
    [
        (Witness(replace(DEATH, exit_code=2), ["w1"]), DEATH, "with the policy"),
        (Witness(DEATH, ["w3"]), DEATH, "served before its death: 'w3'"),
        (Witness(DEATH, [""]), DEATH, "served before its death: ''"),
        (Witness(replace(DEATH, exit_code=None), ["w1"]), None, "the server lives on"),
        (Witness(replace(DEATH, later="200"), ["w1"]), None, "the server lives on"),
    ],
)
def test_a_wrong_death_is_found(ours: Witness, stock: Death | None, start: str) -> None:
    """Another than stock vLLM's, tokens that are not the answer's, or none."""
    pair = ours, Witness(stock or ours.death, [])
    (fault,) = replace(GOOD, deaths={"worker": pair}).faults()
    assert fault.startswith(start)


def test_what_does_not_repeat_is_not_compared() -> None:
    """With pressure a text depends on what else runs; but packs must have come."""
    repeats = MODES["pressure"].repeats
    canaries = [(i, name, name in repeats) for i, name, _ in OUTCOME.canaries]
    report = replace(GOOD, mode="pressure", outcome=replace(OUTCOME, canaries=canaries))
    assert not list(replace(report, happened=1.0).faults())
    (fault,) = report.faults()
    assert fault.startswith("vllm:kv_policy_pressure_packs_total is 0")
    assert list(replace(report, mode="evict_every", happened=1.0).faults())


def test_usage_is_looked_at() -> None:
    """vLLM's own metric."""
    (fault,) = replace(GOOD, usage=0.25).faults()
    assert fault.endswith("vLLM says 25.0% are in use")
