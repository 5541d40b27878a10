# SPDX-License-Identifier: Apache-2.0
"""How many examples a test draws: in every run of a tier the same ones, or nearly.

They depend on the modules that a process has imported, whose constants Hypothesis draws too.
So a test that asks for events draws others until it has seen them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache

from hypothesis import HealthCheck, seed, settings

from tests.house_rules import ROOT, Module, below

MAX_DRAWS = 5
"""How often examples are drawn before an event that they show too seldom is a fault."""

QUICK = "quick"
"""Profile of Hypothesis with which ``make test-fast`` and ``make test`` draw a tenth."""


def is_quick() -> bool:
    """Whether a tenth is drawn."""
    return settings.get_current_profile_name() == QUICK


@cache
def draws(name: str) -> bool:
    """Whether a module of the tests draws examples, itself or by what it imports.

    Args:
        name: of the module, such as ``tests.draws``.

    """
    path = ROOT / f"{name.replace('.', '/')}.py"
    if name == __name__ or not path.exists():
        return name == __name__ or below(name, "hypothesis")
    named = Module(str(path), path.read_text()).imports()
    modules = named | {name.rpartition(".")[0] for name in named}  # what is named may be in one
    return any(draws(module) for module in modules if below(module, "tests", "hypothesis"))


def drawn(num_examples: int) -> settings:
    """Draw ``num_examples`` in ``make test-all``, and a tenth of them in quicker tiers."""
    return settings(
        max_examples=max(num_examples // 10, 2) if is_quick() else num_examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def draw_until_seen(
    examples: Callable[[], None], totals: Counter[str], least: Mapping[str, int]
) -> None:
    """Draw a test's examples, and others until they have shown what the test is about.

    Quick tiers draw few, once, and ask for nothing.

    Args:
        examples: the test; it counts events in ``totals``.
        totals: emptied first.
        least: how often each event must happen in all examples together.

    """
    totals.clear()
    for number in range(1 if is_quick() else MAX_DRAWS):
        seed(number)(examples)()
        if all(totals[event] >= num_events for event, num_events in least.items()):
            return
    assert is_quick(), (least, totals)
