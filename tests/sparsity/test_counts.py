# SPDX-License-Identifier: Apache-2.0
"""Rows read and rows there, from the files of several processes to the front end."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tests.tiny_models import engine_config, folder
from vllm_h2o.sparsity.counts import Counts, SparsityStatLogger, folder_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny OPT with ReLU."""
    return folder(tmp_path_factory.mktemp("models"), "OPTForCausalLM")


def rows(what: str) -> float | None:
    """A counter as ``/metrics`` shows it."""
    return REGISTRY.get_sample_value(f"vllm:mlp_rows_{what}_total", {"model_name": "tiny"})


def test_counts_of_all_processes_are_added_up(
    opt: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a second process, too, which comes later; the folder goes with the engine."""
    unregister_vllm_metrics()
    made = engine_config(opt, served_model_name="tiny", contextual_sparsity="exact")
    where = folder_of(made)
    assert list(where.iterdir()) == []
    shown = SparsityStatLogger(made, [0])
    shown.record()
    assert rows("used") == rows("there") == 0
    first, second = (Counts(where, 2).take(CPU) for _ in range(2))  # of one process, anew
    assert first is not second
    second += torch.tensor([3, 10])
    shown.record()
    assert (rows("used"), rows("there")) == (3, 10)
    np.array([4, 20, 1, 5], dtype=np.int64).tofile(where / "another")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, "vllm.contextual_sparsity"):
        shown.log()
        shown.log()
    assert (rows("used"), rows("there")) == (8, 35)
    own = (record for record in caplog.records if record.name == "vllm.contextual_sparsity")
    said = [record.getMessage() for record in own]
    assert set(said) == {"contextual sparsity: 8 of 35 rows of the MLP read"}
    del made, shown
    gc.collect()
    assert not where.exists()


def test_counts_start_at_zero_and_are_apart(tmp_path: Path) -> None:
    """Also where an engine before has left a file of this process."""
    before = Counts(tmp_path, 1).take(CPU)
    before += 7
    counts = Counts(tmp_path, 2)
    one, other = counts.take(CPU), counts.take(CPU)
    one += 1
    assert one.tolist() == [1, 1] and other.tolist() == [0, 0]


def test_counts_of_a_gpu_are_on_it(tmp_path: Path) -> None:
    """A kernel adds to them there."""
    counts = Counts(tmp_path, 1).take(torch.device("meta"))
    assert counts.device.type == "meta" and counts.dtype == torch.int64
