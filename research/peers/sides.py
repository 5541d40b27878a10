# SPDX-License-Identifier: Apache-2.0
"""Who is compared: an engine with its options, in its environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.smollm2 import model_dir
from benchmarks.throughput.runs import ENVIRONMENT, ON_CPU, ROOT
from research.peers.environments import KVPRESS, OPENVINO, Environment, openvino_folder
from research.peers.job import BLOCK_SIZE, Job, Result


@dataclass(frozen=True)
class Side:
    """An engine.

    Args:
        name: as tables show it.
        module: the worker, in this folder.
        environment: that it runs in; None: this one.
        options: of the engine.
        evicts: whether it keeps to a budget.

    """

    name: str
    module: str
    environment: Environment | None
    options: Mapping[str, Any] = field(default_factory=dict)
    evicts: bool = False

    def options_for(self, budget: int | None) -> dict[str, Any]:
        """With the budget, in tokens, where it has one for the whole engine."""
        options = dict(self.options)
        if self.evicts and "eviction" in options:
            options["eviction"] = {**options["eviction"], "max_cache_size": budget}
        elif self.evicts and budget is not None:
            options["kv_policy_config"] = {**options.get("kv_policy_config", {}), "budget": budget}
        return options


F32 = {"precision": "f32"}
FIRST = BLOCK_SIZE
"""Tokens that OpenVINO keeps at a text's start, and at its end: the least that it takes."""


def openvino(mode: str, **more: Any) -> Side:
    """OpenVINO with eviction, its scores added up in this way."""
    areas = {"start_size": FIRST, "recent_size": FIRST, "aggregation_mode": mode}
    options = {**F32, "eviction": {**areas, **more}}
    return Side(f"OpenVINO, {mode}", "with_openvino", OPENVINO, options, evicts=True)


def ours(policy: str) -> Side:
    """vLLM with a policy."""
    return Side(f"vLLM, {policy}", "with_vllm", None, {"policy": policy}, evicts=True)


def compiled(side: Side) -> Side:
    """vLLM with torch.compile, which it compiles before its time is taken."""
    options = {**side.options, "enforce_eager": False}
    return replace(side, name=f"{side.name}, compiled", options=options)


SIDES = {
    side.name: side
    for side in (
        Side("transformers", "with_transformers", KVPRESS),
        Side("OpenVINO", "with_openvino", OPENVINO, F32),
        openvino("SUM"),
        openvino("NORM_SUM"),
        Side("vLLM", "with_vllm", None),
        ours("h2o"),
        ours("h2o2"),
        compiled(Side("vLLM", "with_vllm", None)),
        compiled(ours("h2o")),
    )
}
"""By name. Without a policy's name all tokens are kept."""


@dataclass(frozen=True)
class Shape:
    """The shape of a token's keys and values, read from a model's ``config.json``.

    Args:
        kv_heads: of all layers.
        head_dim: of one.

    """

    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, folder: Path) -> Shape:
        """Read the shape of a model."""
        config = json.loads((folder / "config.json").read_text())
        heads = config["num_key_value_heads"] * config["num_hidden_layers"]
        return cls(heads, config["hidden_size"] // config["num_attention_heads"])

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V in float32."""
        return self.kv_heads * self.head_dim * 2 * 4


def run(
    side: Side,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    pool_bytes: int,
    max_num_seqs: int,
    budget: int | None,
    log: Path,
) -> tuple[Result, int]:
    """One worker from start to end: what came of it, and its peak resident memory in MiB."""
    shape = Shape.of(model_dir("float32"))
    peer = side.environment is OPENVINO
    folder = openvino_folder() if peer else model_dir("float32")
    options = side.options_for(budget)
    if side.module == "with_vllm":
        options = {"kv_heads": shape.kv_heads, "enforce_eager": True, **options}
    job = Job(
        str(folder),
        [list(prompt) for prompt in prompts],
        output_len,
        pool_bytes,
        shape.bytes_per_token,
        max_num_seqs,
        options,
    )
    python = str(side.environment.python()) if side.environment else sys.executable
    environment = {**os.environ, **ENVIRONMENT, **ON_CPU, "OMP_NUM_THREADS": "1"}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "VLLM_CPU_KVCACHE_SPACE": str(1 + (pool_bytes >> 30)),
        # On one core nothing runs next to the engine: one process for all is the fastest.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    with tempfile.TemporaryDirectory() as name, log.open("a") as file:
        paths = Path(name) / "job.json", Path(name) / "result.json"
        job.write(paths[0])
        command = [python, "-m", f"research.peers.{side.module}", *map(str, paths)]
        print(side.name, budget, *command, file=file, flush=True)
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
        peak = _peak_memory(process)
        if process.returncode:
            raise RuntimeError(
                f"{side.name} was to answer {len(prompts)} requests, but its worker ended with "
                f"exit status {process.returncode}: {log} has its output"
            )
        return Result.read(paths[1]), peak


def _peak_memory(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process; the most memory that it and those that it started had, in MiB."""
    watched, most = psutil.Process(process.pid), 0
    while process.poll() is None:
        total = 0
        try:
            for member in (watched, *watched.children(recursive=True)):
                total += member.memory_info().rss
        except psutil.NoSuchProcess:
            continue
        most = max(most, total)
        time.sleep(1)
    return most >> 20
