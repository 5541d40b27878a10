# SPDX-License-Identifier: Apache-2.0
"""The trained model with ReLU: made in steps, known by its folder, and measured on its text."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.relu import figures, model_dir
from tests.needs import needs_texts
from vllm_h2o.sparsity.report import measure


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of training, and two for zeros."""
    needs_texts()
    return model_dir(2, 2, tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
def test_model_is_trained_once_and_measured(model: Path) -> None:
    """`exact` changes nothing but the order of sums; a row of the CSV has what was measured."""
    changed = (model / "model.safetensors").stat().st_mtime_ns
    assert model_dir(2, 2, model.parent) == model
    assert (model / "model.safetensors").stat().st_mtime_ns == changed
    text = (model / "held_out.txt").read_text(encoding="utf-8")
    assert "Ahab" in text
    report = measure(str(model), text, 0.99)
    assert len(report.layers) == 6
    row = figures(model, 2, 2, report)
    assert row["nll_exact"] == pytest.approx(row["nll_dense"], abs=1e-4)
    assert 0.2 < row["zeros"] < 0.9 and row["recall"] > 0.95
    assert row["used_1"] == pytest.approx(1 - row["zeros"], abs=1e-4)
    assert row["used_1"] < row["used_8"] < row["used_32"] <= 1
    assert row["mb_exact_1"] < row["mb_dense_1"] == row["mb_dense_8"]
