# SPDX-License-Identifier: Apache-2.0
"""Judge a soak: each function yields a sentence for each fault."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Sequence

from benchmarks.soak.audit import Figures
from benchmarks.soak.chaos import Witness
from benchmarks.soak.load import Outcome, Shape

WARM_UP = 0.5
"""Share of the requests before memory is looked at: first come shapes that torch has not seen."""
MIB = 2**20


def growth(memory: Sequence[tuple[int, dict[str, int]]], role: str) -> float:
    """MiB that a process gains in a thousand requests: the slope of a line through the samples.

    Args:
        memory: for each sample: requests so far, and the resident bytes of each process.
        role: which process.

    """
    start = WARM_UP * memory[-1][0]
    points = [(requests, rss[role] / MIB) for requests, rss in memory if requests >= start]
    slope, _ = statistics.linear_regression(*zip(*points, strict=True))
    return 1000 * slope


def untouched(
    outcome: Outcome, preempted: Sequence[str], repeats: Collection[str]
) -> list[tuple[str, bool]]:
    """Name and sameness of the canaries that repeat and were not preempted.

    One that was is computed again with its answer as part of its prompt, and may differ.
    """
    # vLLM puts its own words around the id that a client gives.
    hit = {name for name, *_ in outcome.canaries for where in preempted if name in where}
    return [
        (canary, same)
        for name, canary, same in outcome.canaries
        if name not in hit and canary in repeats
    ]


def of_load(
    outcome: Outcome, shape: Shape, preempted: Sequence[str], repeats: Collection[str]
) -> Iterator[str]:
    """Answers, canaries and memory.

    Args:
        outcome: of the load.
        shape: its sizes.
        preempted: ids of requests, as the audit has them.
        repeats: names of the canaries that are to be answered alike.

    """
    yield from outcome.surprises
    if outcome.num_requests < shape.least_requests:
        yield f"{outcome.num_requests} requests, at least {shape.least_requests} were to be sent"
    compared = untouched(outcome, preempted, repeats)
    for name in sorted(repeats):
        same = [same for found, same in compared if found == name]
        if len(same) < 3 or not all(same):
            yield f"canary {name!r}: {sum(same)} of {len(same)} answers are the first one"
    for role in outcome.memory[-1][1]:
        gained = growth(outcome.memory, role)
        if gained > shape.growth_mib:
            yield f"{role} gains {gained:.1f} MiB in a thousand requests"


def of_pages(figures: Figures, usage: float) -> Iterator[str]:
    """After the load: every page is free, and was accounted for at every step.

    Args:
        figures: the audit's.
        usage: ``vllm:kv_cache_usage_perc``.

    """
    if figures.failure:
        yield figures.failure
    if figures.checks < figures.steps or not figures.steps:
        yield f"{figures.checks} checks in {figures.steps} steps"
    if figures.requests or figures.held or figures.free != figures.total or usage:
        yield (
            f"{figures.requests} requests, {figures.held} pages held and {figures.free} of "
            f"{figures.total} free after the load; vLLM says {usage:.1%} are in use"
        )
    if not figures.preempted:
        yield "nothing was preempted: the load was too light"


def of_death(ours: Witness, stock: Witness, expected: str) -> Iterator[str]:
    """A killed process: as stock vLLM fares, and no wrong token on the way.

    Args:
        ours: with the policy.
        stock: without, started and killed in the same way.
        expected: the whole answer that was being given with the policy.

    """
    if ours.death != stock.death:
        yield f"with the policy: {ours.death}; stock vLLM: {stock.death}"
    if ours.death.exit_code is None or ours.death.later == "200":
        yield f"the server lives on without its engine: {ours.death}"
    for text in ours.served:
        if not text or not expected.startswith(text):
            yield f"served before its death: {text!r}, and right was {expected!r}"
