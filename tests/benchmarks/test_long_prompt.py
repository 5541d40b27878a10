# SPDX-License-Identifier: Apache-2.0
"""A prompt over HTTP that is longer than the context and the pool, in the bench's short form."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.long_prompt import measure, parse


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_long_prompt_of_twenty_contexts_is_answered(tmp_path: Path) -> None:
    """It is taken in and answered; the worker, which has a million columns, does not grow."""
    trained = 512
    sizes = {"trained": trained, "cache": 128, "chunk": 128, "tokens": 20 * trained}
    given = [f"--{name}={size}" for name, size in sizes.items()]
    row = measure(tmp_path, parse([*given, "--max-model-len=1000000", "--max-tokens=9"]))
    assert (row["prompt_tokens"], row["completion_tokens"]) == (20 * trained, 9)
    assert row["pool_tokens"] == 256
    # All of it and of the first, which warms up, but what stays; and for seven of the answer.
    assert row["evicted_tokens"] == (2 + 20) * trained - 2 * 127 + 7
    assert row["worker_mib_after"] - row["worker_mib_before"] < 16
