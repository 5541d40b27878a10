# SPDX-License-Identifier: Apache-2.0
"""The book of host memory: which entries make room, what workers are told, and what is counted."""

from __future__ import annotations

import pytest

from vllm_h2o.errors import IntegrityError
from vllm_h2o.scheduler.host import HostMemory
from vllm_h2o.wire import Saved


def test_least_recently_used_make_room() -> None:
    """As many as it takes, and none where there is room."""
    host = HostMemory(3)
    first, second, third = (host.save((n,)) for n in range(3))
    host.use(first)
    assert list(host.too_many(0)) == []
    gone = []
    for number in host.too_many(2):
        host.drop(number)
        gone.append(number)
    assert gone == [second, third]
    host.check_integrity({first})


def test_copies_are_told_once_and_not_after_a_reset() -> None:
    """A worker is told to drop only what it has been told to save."""
    host = HostMemory(10)
    first = host.save((1, 2))
    assert host.take() == ((Saved(first, (1, 2)),), ())
    second = host.save((3,))
    assert host.num_used == 2 + 1
    host.drop(first)
    host.drop(second)
    host.forget_copies()
    assert host.take() == ((), (first,))
    assert host.take() == ((), ())
    assert host.take_counts() == {"continuation_host_saves": 1, "continuation_host_drops": 0}


def test_entry_that_is_not_counted_is_seen() -> None:
    """Or one that is counted and not known."""
    host = HostMemory(10)
    number = host.save((1,))
    for known in ({number, 5}, set()):
        with pytest.raises(IntegrityError, match="host memory counts entries"):
            host.check_integrity(known)
