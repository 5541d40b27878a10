# SPDX-License-Identifier: Apache-2.0
"""One run of one side of a profile, and what is kept of it."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.record import cores
from benchmarks.throughput.models import MODELS, folder_of
from benchmarks.throughput.profiles import Profile, Side

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores())),
    "VLLM_CPU_KVCACHE_SPACE": "4",
}


def run(
    profile: Profile, side: Side, device: str, log: Path, compiled: bool = False
) -> dict[str, Any]:
    """One engine from start to end; what the bench and the watch say.

    Args:
        profile: the work.
        side: the engine.
        device: cpu or gpu; on a GPU vLLM compiles always.
        log: takes what the engine prints.
        compiled: on a CPU, too.

    """
    folder, options = folder_of(profile.model, device == "cpu" or _has_bfloat16())
    options += profile.options(side, MODELS[profile.model].bytes_per_slot)
    environment = {**os.environ, **ENVIRONMENT}
    if device == "cpu":
        environment.update(ON_CPU)
        if not compiled:
            # torch.compile takes longer to start here than a profile runs; no side has it.
            options.append("--enforce-eager")
    with tempfile.TemporaryDirectory() as folder_of_run:
        out = Path(folder_of_run) / "figures.json"
        command = [sys.executable, "-m", "benchmarks.throughput.watch", str(out)]
        command += ["--model", str(folder), *options]
        with log.open("a") as file:
            print(*command, file=file, flush=True)
            subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file, check=True)
        return dict(json.loads(out.read_text()))


def _has_bfloat16() -> bool:
    """Whether the GPU has bfloat16: vLLM refuses it before 8.0."""
    import torch

    return torch.cuda.get_device_capability()[0] >= 8


def row_of(
    profile: Profile, side: Side, figures: Mapping[str, Any], machine: str, pair: int
) -> dict[str, Any]:
    """One run, as the CSV has it."""
    seconds = figures["elapsed_time"]
    blocks = profile.num_blocks(side, MODELS[profile.model].bytes_per_slot)
    return {
        "profile": profile.id,
        "side": side.name,
        "pair": pair,
        "machine": machine,
        "vllm": version("vllm"),
        "torch": version("torch"),
        "model": profile.model,
        "input_len": profile.input_len,
        "output_len": profile.output_len,
        "num_prompts": profile.num_prompts,
        "pool_pages": blocks,
        "page_tokens": profile.block_size,
        "budget": side.budget,
        "seconds": round(seconds, 3),
        "output_tokens_per_s": round(profile.num_prompts * profile.output_len / seconds, 2),
        "step_ms": round(1000 * figures["step_seconds"], 3),
        "mean_sequences": round(figures["mean_sequences"], 2),
        "peak_sequences": figures["peak_sequences"],
        "preemptions": figures["preemptions"],
        "peak_pages": round(figures["peak_usage"] * (blocks - 1)) if blocks else None,
    }


def ratios(
    found: Sequence[Mapping[str, Any]], column: str, over: str, under: str, turn: str = "pair"
) -> list[float]:
    """Return one side's value over another's, of each round in order, whoever ran first.

    Args:
        found: the rows of some rounds.
        column: of the value.
        over: a side.
        under: another side.
        turn: the column that has a round's number.

    """
    values = {(row[turn], row["side"]): row[column] for row in found}
    return [values[n, over] / values[n, under] for n in sorted({n for n, _ in values})]


def spread(each: Sequence[float]) -> str:
    """Format the median, with the least and the greatest."""
    return f"{statistics.median(each):.2f} [{min(each):.2f}, {max(each):.2f}]"


def ratio_of(profile: Profile, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """Above 1 where h2o is faster."""
    if profile.figure == "step":
        return float(theirs["step_ms"]) / float(ours["step_ms"])
    return float(ours["output_tokens_per_s"]) / float(theirs["output_tokens_per_s"])
