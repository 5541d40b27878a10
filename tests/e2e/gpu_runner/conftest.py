# SPDX-License-Identifier: Apache-2.0
"""One process with Model Runner V2 for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.gpu_runner.process import OtherProcess


@pytest.fixture(scope="package")
def v2() -> Iterator[OtherProcess]:
    """It starts once."""
    other = OtherProcess()
    yield other
    other.end()
