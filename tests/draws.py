# SPDX-License-Identifier: Apache-2.0
"""How many examples a test draws: in every run of a tier the same ones, or nearly.

They depend on the modules that a process has imported, whose constants Hypothesis draws too.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

QUICK = "quick"
"""Profile of Hypothesis with which ``make test-fast`` and ``make test`` draw a tenth."""


def is_quick() -> bool:
    """Whether a tenth is drawn."""
    return settings.get_current_profile_name() == QUICK


def drawn(num_examples: int) -> settings:
    """Draw ``num_examples`` in ``make test-all``, and a tenth of them in quicker tiers."""
    return settings(
        max_examples=max(num_examples // 10, 2) if is_quick() else num_examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def seen_by_all(num_events: int) -> int:
    """Return how many events all examples must show together: none where few are drawn.

    Ask for far fewer than a run shows, since another order of tests draws other examples.
    """
    return 0 if is_quick() else num_events
