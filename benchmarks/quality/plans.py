# SPDX-License-Identifier: Apache-2.0
"""Plans of a measurement: tasks, budgets and policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.quality import tasks, texts
from benchmarks.quality.facts import facts
from benchmarks.quality.phrasings import CONFIRMATION, DEVELOPMENT, Source
from benchmarks.quality.tasks import Task
from benchmarks.quality.traces import CONFIRMATION_SEED, DEVELOPMENT_SEED, KINDS, traces
from benchmarks.quality.writing import writing

BLOCK_SIZE = 16
Make = Callable[..., Task]

POLICIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "h2o": ("h2o", {}),
    "h2o sum_squares": ("h2o", {"score": "sum_squares"}),
    "h2o mean_squares": ("h2o", {"score": "mean_squares"}),
    "h2o2": ("h2o2", {}),
    "streaming": ("streaming", {}),
    "local": ("local", {}),
}
"""By the name in tables: a policy, and its options."""
VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    **POLICIES,
    "h2o mean_squares merge": ("h2o", {"score": "mean_squares", "merge": 0.8}),
    "h2o2 reconstruction": ("h2o2", {"score": "reconstruction"}),
    "h2o2 window": ("h2o2", {"score": "window"}),
    "snapkv": ("snapkv", {}),
}
"""These and others, which run where a plan or the command line names them."""


def slots(share: float, length: int, block_size: int = BLOCK_SIZE) -> int:
    """A share of a length, in whole pages."""
    return block_size * max(1, round(share * length / block_size))


@dataclass(frozen=True)
class Plan:
    """One task, run with each policy and budget.

    Args:
        make: the task.
        shares: budgets, as shares of its length.
        policies: names in :data:`VARIANTS`.

    """

    make: Make
    shares: Sequence[float]
    policies: Sequence[str] = tuple(POLICIES)


def prose(length: int, forced: int, count: int, names: Sequence[str] = texts.TEXTS) -> Make:
    """``count`` windows of each text."""
    return partial(tasks.prose, names=names, count=count, length=length, tail=forced)


AFTER: tuple[Make, ...] = (
    prose(1024, 64, 4),
    partial(tasks.passkey, count=30, length=1024),
    partial(tasks.pairs, count=8, length=1024),
)
"""Judged after one compression, at the end of the context: what kvpress does, too."""
SHARES_AFTER = (0.1, 0.2, 0.3, 0.5)

SCORED = ("h2o", "h2o mean_squares", "h2o2", "h2o2 reconstruction")
PLANS: Mapping[str, Plan] = {
    "1k": Plan(
        prose(1024, 768, 2),
        (0.05, 0.1, 0.2, 0.4, 0.6),
        (*POLICIES, "h2o mean_squares merge", "h2o2 reconstruction"),
    ),
    "1k-dev": Plan(prose(1024, 768, 4, DEVELOPMENT.texts), (0.05, 0.1, 0.2)),
    "novel": Plan(prose(1536, 1280, 4, ("moby_dick",)), (0.05, 0.1, 0.2)),
    "2k": Plan(prose(2048, 1792, 2), (0.05, 0.1, 0.2, 0.4), (*SCORED, "streaming")),
    "after": Plan(AFTER[0], SHARES_AFTER),
    # With the tokens more that a press has in the end.
    "after-64": Plan(AFTER[0], tuple(share + 64 / 1024 for share in SHARES_AFTER), SCORED),
    "pairs": Plan(AFTER[2], (0.2, 0.3), SCORED),
    "passkey": Plan(AFTER[1], (0.2, 0.3), SCORED),
    "commonsense": Plan(
        partial(tasks.commonsense, count=80), (0.2,), (*SCORED, "streaming", "local")
    ),
    "4k": Plan(prose(4096, 3840, 1), (0.05, 0.1, 0.2), (*SCORED, "streaming")),
    "passkey-2k": Plan(partial(tasks.passkey, count=20, length=2048), (0.2, 0.3), SCORED),
    "passkey-4k": Plan(partial(tasks.passkey, count=12, length=4096), (0.2,), SCORED),
}
"""In the engine, by the name on the command line."""


def _facts(source: Source, end: str) -> dict[str, Plan]:
    """Facts in every form, at small budgets."""
    policies = (*SCORED, "streaming", "local", "snapkv")
    return {
        f"facts-{name}{end}": Plan(
            partial(facts, source=source, form=form), (0.1, 0.2, 0.3), policies
        )
        for name, form in FACT_FORMS.items()
    }


FACT_FORMS = {
    "now": "asked_now",
    "later": "asked_later",
    "many": "one_of_many",
    "instructed": "instructed",
    "turns": "turns",
}
NEEDLES = ("h2o2", "snapkv", "streaming", "h2o")
SIZES: Mapping[str, tuple[int, int, Sequence[float], Sequence[str]]] = {
    "512": (512, 50, (0.2,), NEEDLES),
    "1536": (1536, 50, (0.2,), NEEDLES),
    "4k": (4096, 25, (0.1, 0.2), ("h2o2",)),
    "8k": (8000, 20, (0.1, 0.2), ("h2o2",)),
}
"""Tokens of a prompt, prompts, budgets and policies."""
OTHER_LENGTHS = {
    f"facts-now-{name}": Plan(
        partial(facts, source=CONFIRMATION, form="asked_now", count=count, length=length),
        shares,
        policies,
    )
    for name, (length, count, shares, policies) in SIZES.items()
}
ANEW = replace(CONFIRMATION, name="anew", seed=3)
FACTS: Mapping[str, Plan] = {
    **_facts(CONFIRMATION, ""), **_facts(DEVELOPMENT, "-dev"), **_facts(ANEW, "-anew"),
    **OTHER_LENGTHS,
}  # fmt: skip
"""Facts as users state them: ``facts-now`` and so on, ``-dev`` to choose and tune on, ``-anew``
with other facts, places and hays' windows than those of the confirmation set."""
# 1,536 slots in the end: whole pages at both shares.
WRITTEN = partial(writing, names=CONFIRMATION.texts, count=12, prompt=36, output=1500)
LONG_OUTPUTS: Mapping[str, Make] = {
    "write-greedy": partial(WRITTEN, temperature=0),
    "write-sampled": partial(WRITTEN, temperature=0.7),
    **{
        f"trace-{kind}{end}": partial(traces, kind=kind, seed=seed, count=16)
        for kind in KINDS
        for end, seed in (("", CONFIRMATION_SEED), ("-dev", DEVELOPMENT_SEED))
    },
}
LONG: Mapping[str, Plan] = {
    name: Plan(make, (0.125, 0.25), ("h2o2", "h2o", "streaming"))
    for name, make in LONG_OUTPUTS.items()
}
"""Long outputs: text that is written freely, and traces with look-ups, ``-dev`` to tune on."""
QUICK = Plan(prose(256, 160, 1, texts.TEXTS[:2]), (0.125,), ("h2o", "h2o2", "local"))
"""A minute, orders only."""
