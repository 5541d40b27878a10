# SPDX-License-Identifier: Apache-2.0
"""Two nodes, started as docs/cluster.md starts them, answer as one process does."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.server import ENVIRONMENT, ROOT, write_model
from tests.e2e.server import Completing, blocks, free_port

PAGE = ROOT / "docs/cluster.md"
ADDRESS = "10.0.0.1"
"""What stands for the first machine's address on the page."""
TRACED = ["--compilation-config.mode=2", "--compilation-config.backend=eager"]
"""On a CPU there are buffers between two stages where a model is traced; to compile it takes a
minute more."""
SETTINGS = ["--dtype=float32", "--max-model-len=512", "--block-size=16", *TRACED]
PROMPTS = ["The old sailor told us about the storm. " * 5, "w " * 150, "abc"]
"""Longer than the budget of 64 slots, and shorter."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers and two KV heads."""
    folder: Path = tmp_path_factory.mktemp("model")
    write_model(folder, 512)
    return folder


def documented(kind: str) -> list[list[str]]:
    """Return the flags of both machines for one kind of parallelism."""
    commands = [shlex.split(block.code.replace("\\\n", " ")) for block in blocks(PAGE)]
    return [command[3:] for command in commands if f"--{kind}-parallel-size" in command]


def without_nodes(flags: list[str]) -> list[str]:
    """Return the flags of one process that does all."""
    text = " ".join(flags)
    text = re.sub(r" --(nnodes|node-rank|master-\w+|(tensor|pipeline)-\S+) \S+", "", text)
    return shlex.split(text)


@contextmanager
def two_nodes(model: Path, tmp_path: Path, kind: str) -> Iterator[Completing]:
    """Start both nodes as the page does; yield the one that answers."""
    port = str(free_port())
    first, second = (
        [flag.replace(ADDRESS, "127.0.0.1").replace("29501", port) for flag in flags]
        for flags in documented(kind)
    )
    headless = Completing(model, tmp_path / "second.log", [*SETTINGS, *second])
    try:
        with Completing(model, tmp_path / "first.log", [*SETTINGS, *first]) as server:
            yield server
    finally:
        headless.stop()


def answers(server: Completing) -> list[Any]:
    """Return the tokens that a server says, and the tokens that it evicted."""
    asked = {"max_tokens": 40, "ignore_eos": True, "logprobs": 0}
    said = [server.complete(prompt=prompt, **asked) for prompt in PROMPTS]
    assert [status for status, _ in said] == [200] * len(PROMPTS)
    tokens = [answer["choices"][0]["logprobs"]["tokens"] for _, answer in said]
    return [*tokens, server.metric("vllm:kv_policy_evicted_tokens_total")]


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return what one process answers."""
    flags = without_nodes(documented("tensor")[0])
    log = tmp_path_factory.mktemp("alone") / "log"
    with Completing(model, log, [*SETTINGS, *flags], environment=ENVIRONMENT) as server:
        return answers(server)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_two_nodes_answer_as_one_process(
    model: Path, tmp_path: Path, alone: list[Any], kind: str
) -> None:
    """The same tokens, past the budget, and as many evictions."""
    with two_nodes(model, tmp_path, kind) as server:
        assert answers(server) == alone
    assert alone[-1] > 0


@pytest.mark.engine
@pytest.mark.slow
def test_two_ray_nodes_answer_as_one_process(model: Path) -> None:
    """Ray's executor passes the plan on."""
    pytest.importorskip("ray")
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": str(ROOT),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.on_ray", str(model)], env=environment, cwd=ROOT,
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"alone"'))
    said = json.loads(line)
    assert said["ray"] == said["alone"]
