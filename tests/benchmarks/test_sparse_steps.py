# SPDX-License-Identifier: Apache-2.0
"""The benchmark of sparse steps runs engines of each side. Nothing is timed here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.throughput import sparsity
from benchmarks.throughput.models import write_sparse
from tests.tiny_models import two_layer_opt


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("side", sparsity.SIDES)
def test_steps_are_timed_at_each_number_of_sequences(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tiny model, with fewer sequences."""
    model = write_sparse(two_layer_opt(1024, 512), tmp_path, sparsity.ZEROS)
    monkeypatch.setattr(sparsity, "model_dir", lambda: model)
    monkeypatch.setattr(sparsity, "SEQUENCES", (1, 2))
    monkeypatch.setitem(sparsity.SHAPE, "vocab_size", 256)
    found = sparsity.step_times("float32", sparsity.SIDES[side])
    assert list(found) == [1, 2] and min(found.values()) > 0


def test_ratio_is_of_each_round() -> None:
    """Each round has its ratio, whoever ran first; the table has their median and ends."""
    times = {"stock": (20.0, 30.0), "exact": (10.0, 20.0)}
    found = [
        {"pair": n, "side": side, "sequences": count, "step_ms": each[n]}
        for side, each in times.items()
        for n in (0, 1)
        for count in sparsity.SEQUENCES
    ]
    assert sparsity.ratios(found, "exact", 1) == [1.5, 2.0]
    assert "| exact | 1.75 [1.50, 2.00] |" in sparsity.table(found)
