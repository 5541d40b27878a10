# SPDX-License-Identifier: Apache-2.0
"""Rows read and rows there, from the files of several processes to the front end."""

from __future__ import annotations

import gc
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tests.tiny_models import engine_config, folder
from vllm_h2o.hooks import add_stat_logger
from vllm_h2o.sparsity.counts import Counts, SparsityStatLogger, folder_of, shown


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
    logger = SparsityStatLogger(made)
    logger.record()
    assert rows("used") == rows("stock") == 0
    own = Counts(where, 2).take()
    own += torch.tensor([3, 10])
    logger.record()
    assert (rows("used"), rows("stock")) == (3, 10)
    np.array([4, 20, 1, 5], dtype=np.int64).tofile(where / "another")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, "vllm.contextual_sparsity"):
        logger.log()
        logger.log()
    assert (rows("used"), rows("stock")) == (8, 35)
    own = (record for record in caplog.records if record.name == "vllm.contextual_sparsity")
    said = [record.getMessage() for record in own]
    assert set(said) == {"contextual sparsity: 8 of 35 rows of the MLP read"}
    del made, logger
    gc.collect()
    assert not where.exists()


def test_counts_start_at_zero_and_are_apart(tmp_path: Path) -> None:
    """Also where an engine before has left a file of this process."""
    before = Counts(tmp_path, 1).take()
    before += 7
    counts = Counts(tmp_path, 2)
    one, other = counts.take(), counts.take()
    one += 1
    counts.take().add_(1)  # one more than there is place for
    assert one.tolist() == [1, 1] and other.tolist() == [0, 0]


def test_counts_whose_files_are_gone_stay(opt: str) -> None:
    """A file that has no size yet is read later; a folder that was removed harms nothing."""
    unregister_vllm_metrics()
    made = engine_config(opt, served_model_name="tiny", contextual_sparsity="exact")
    where, logger = folder_of(made), SparsityStatLogger(made)
    (where / "begun").touch()
    logger.record()
    assert rows("used") == 0
    np.array([4, 20], dtype=np.int64).tofile(where / "begun")
    logger.record()
    shutil.rmtree(where)
    logger.record()
    assert (rows("used"), rows("stock")) == (4, 20)


def test_counts_behind_several_api_servers_are_not_shown(opt: str) -> None:
    """Each of them would look into a folder of its own."""
    made = engine_config(opt, served_model_name="tiny", contextual_sparsity="exact")
    assert shown(made)
    made.parallel_config._api_process_count = 2
    assert not shown(made)
    manager = SimpleNamespace(stat_loggers=[], engine_indexes=[0])
    add_stat_logger(manager, made)
    assert manager.stat_loggers == []
