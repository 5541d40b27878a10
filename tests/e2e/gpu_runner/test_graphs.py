# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2, full CUDA graphs, and the kernels for GPUs: all that a GPU's default start has.

But piecewise graphs, which take a prompt's step: without torch.compile such a step runs eagerly.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.e2e.gpu_runner.job import GRAPHS, SETTINGS, Job, on_v1
from tests.e2e.gpu_runner.process import OtherProcess
from tests.e2e.harness import CHARACTERS, tiny_llama

SETTINGS_OF_GRAPHS: dict[str, Any] = {**SETTINGS, **GRAPHS}


def job(folder: Path) -> Job:
    """Two requests, then one more: the last chunk of its prompt is one token, among theirs."""
    return Job(
        tiny_llama(folder, 2, 1),
        "h2o",
        {"budget": 16},
        [CHARACTERS[:5], CHARACTERS[40:60], CHARACTERS[70:101]],
        max_tokens=8,
        arrivals=[0, 0, 4],
        settings=SETTINGS_OF_GRAPHS,
        triton=True,
        record=True,
    )


def test_captured_is_eager(v2: OtherProcess, tmp_path: Path) -> None:
    """Three rows in a graph of four, then one in a graph of one; a prompt packed after a graph."""
    asked = job(tmp_path)
    ours = v2.run(asked)
    assert ours.replays >= 10
    assert ours.packed_after_graphs == 1
    assert ours.in_flight == 2
    theirs = on_v1(asked)
    assert ours.tokens == theirs.tokens
    assert ours.held.keys() == theirs.held.keys()
    assert ours.held == theirs.held


def test_what_a_graph_does_not_see(v2: OtherProcess, tmp_path: Path) -> None:
    """Were a step's numbers not where the captured kernels look, its tokens would be others."""
    asked = replace(job(tmp_path), max_tokens=5, arrivals=[], record=False)
    asked.settings = {**SETTINGS_OF_GRAPHS, "kernel_config": {"enable_jit_warmup": False}}
    ours = v2.run(replace(asked, forgetful=True))
    assert ours.replays > 0
    assert ours.tokens != on_v1(asked).tokens


def test_positions_that_roll(v2: OtherProcess, tmp_path: Path) -> None:
    """Past what the model was trained for, from memory that captured launches read."""
    options = {"budget": 16, "positions": "rolling", "eviction": "chunk"}
    asked = replace(job(tmp_path), options=options, max_tokens=6, arrivals=[], record=False)
    asked.prompts[0] = CHARACTERS[:75]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 56}))
    ours = v2.run(asked)
    assert ours.replays > 0
    assert ours.tokens == on_v1(asked).tokens
