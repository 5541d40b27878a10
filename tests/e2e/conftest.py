# SPDX-License-Identifier: Apache-2.0
"""One server for all tests that talk to one, and the tier of each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import tiny_llama
from tests.e2e.mechanisms import MECHANISMS
from tests.e2e.server import Completing

FOLDER = Path(__file__).parent


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Completing]:
    """The server of examples/serve.md, with 64 slots a sequence."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOG_STATS_INTERVAL", "1")
        with Completing.documented(tmp_path_factory.mktemp("serve") / "log") as server:
            yield server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers of two KV heads."""
    return tiny_llama(tmp_path_factory.mktemp("llama"), 4, 2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests as ``engine``, and all but one a mechanism as ``slow``.

    Tests that use the server come first, one after the other: it starts once, and then ends.
    """
    quick = {f"tests/e2e/{test}" for test in MECHANISMS.values()}
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker("engine")
            if item.nodeid not in quick:
                item.add_marker("slow")

    def uses_no_server(item: pytest.Item) -> bool:
        own = item.path.parent == FOLDER and isinstance(item, pytest.Function)
        return not (own and "server" in item.fixturenames)

    items.sort(key=uses_no_server)
