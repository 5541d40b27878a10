# SPDX-License-Identifier: Apache-2.0
"""Kernels are compared on one thread: small tensors gain nothing from more, and sums keep order.

A few policies are on the shelf that only these tests have. The quick tiers run one case of three.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.kernels.lives import OTHERS
from vllm_h2o.policy import shelf

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark two of three cases of each test as ``slow``; its first case is not."""
    num_cases: Counter[str] = Counter()
    for item in items:
        if FOLDER in item.path.parents:
            name = item.nodeid.partition("[")[0]
            if num_cases[name] % 3:
                item.add_marker("slow")
            num_cases[name] += 1


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Torch computes on one thread while a module's tests run."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True, scope="module")
def other_policies() -> Iterator[None]:
    """Policies of these tests, while a module's tests run."""
    with pytest.MonkeyPatch.context() as patch:
        for policy in OTHERS:
            patch.setitem(shelf._SHELF, policy.name, policy)
        yield
