# SPDX-License-Identifier: Apache-2.0
"""Rows read and rows there, of each process in a file that it maps; the front end adds them up.

::

    worker: kernels add to ``counts``, a part of its file
    front end: SparsityStatLogger -> /metrics, vLLM's log

A step costs the worker nothing, and nothing is sent. A GPU counts in its own memory, which is not
shown; nor are the counts of engines behind several API servers, which agree about no folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prometheus_client import Counter
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

logger = init_logger("vllm.contextual_sparsity")

COUNTERS = {
    "used": "With contextual sparsity: rows of the MLP's weights that steps of up to max_tokens "
    "tokens have read, in all layers and all ranks of this machine.",
    "stock": "With contextual sparsity: rows that stock vLLM would have read in these steps.",
}
"""Name of a count -> description of ``vllm:mlp_rows_<...>_total``."""


def folder_of(vllm_config: Any) -> Path:
    """Return the folder of an engine's counts; the processes of a machine agree about it."""
    return Path(tempfile.gettempdir()) / f"vllm-h2o-sparsity-{vllm_config.instance_id}"


def shown(vllm_config: Any) -> bool:
    """Whether the front end can show an engine's counts: of CPUs, and to one API server."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu() and vllm_config.parallel_config._api_process_count == 1


def make_folder(vllm_config: Any) -> None:
    """Make the folder of an engine's counts, which goes with the engine's config."""
    folder = folder_of(vllm_config)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    weakref.finalize(vllm_config, shutil.rmtree, folder, ignore_errors=True)


class Counts:
    """The counts of one process, a pair of numbers for each matrix.

    Args:
        folder: of the engine's counts; it is there.
        most: matrices, at most.

    """

    def __init__(self, folder: Path, most: int) -> None:
        path = folder / str(os.getpid())
        path.unlink(missing_ok=True)
        pairs = torch.from_file(str(path), shared=True, size=2 * most, dtype=torch.int64)
        self._free = iter(pairs.view(most, 2))

    def take(self) -> torch.Tensor:
        """Return zeros for rows read and rows there of one more matrix: int64 [2].

        Those of more than ``most`` matrices are not shown.
        """
        return next(self._free, torch.zeros(2, dtype=torch.int64))


class SparsityStatLogger(AggregateStatLoggerBase):
    """Shows the rows that all processes of an engine have read.

    Args:
        vllm_config: the engine's config, with contextual sparsity.

    """

    def __init__(self, vllm_config: Any) -> None:
        self._folder = folder_of(vllm_config)
        self._files: dict[str, np.ndarray] = {}
        name = vllm_config.model_config.served_model_name
        self._counters = [
            Counter(f"vllm:mlp_rows_{what}", said, ["model_name"]).labels(name)
            for what, said in COUNTERS.items()
        ]
        self._shown, self._logged = np.zeros((2, 2), dtype=np.int64)

    def record(self, *_: Any, **__: Any) -> None:
        """Export what was read since the last time."""
        total = self._total()
        for counter, more in zip(self._counters, total - self._shown, strict=True):
            counter.inc(int(more))
        self._shown = total

    def log(self) -> None:
        """Log one line, if any step was counted since the last one."""
        self.record()
        used, there = self._shown - self._logged
        if there:
            logger.info("contextual sparsity: %d of %d rows of the MLP read", used, there)
        self._logged = self._shown

    def log_engine_initialized(self) -> None:
        """Log nothing: the line at start says what is skipped."""

    def _total(self) -> np.ndarray:
        with suppress(OSError, ValueError):  # a folder that was removed, a file without its size
            for name in os.listdir(self._folder):
                if name not in self._files:
                    self._files[name] = np.memmap(self._folder / name, np.int64, "r")
        sums = [pairs.reshape(-1, 2).sum(0) for pairs in self._files.values()]
        return np.sum(sums, axis=0) if sums else np.zeros(2, dtype=np.int64)
