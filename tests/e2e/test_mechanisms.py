# SPDX-License-Identifier: Apache-2.0
"""The engine tests of ``make test`` are there under the names by which they are chosen."""

from __future__ import annotations

import pytest

from tests.e2e.mechanisms import MECHANISMS


def test_each_mechanism_is_a_test(request: pytest.FixtureRequest) -> None:
    """Among what has been collected: a test of another name would be left out in silence."""
    collected = {item.nodeid for item in request.session.items}
    if len(collected) == 1:
        pytest.skip("collected alone")
    missing = {name for name, test in MECHANISMS.items() if f"tests/e2e/{test}" not in collected}
    assert not missing
