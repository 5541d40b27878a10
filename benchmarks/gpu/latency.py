# SPDX-License-Identifier: Apache-2.0
"""Times to first tokens and between tokens: ``vllm bench serve`` against a server of each side."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.soak.server import VLLM, Server, write_model
from benchmarks.throughput.models import MODELS, folder_of
from benchmarks.throughput.profiles import Profile, tight

PERCENTILES = (50, 99)
SMALL = Profile("small", "", "", 64, 32, 8, tight(0.5, 2 * 128))
Figures = dict[str, float]


def measure(
    profile: Profile, requests_per_s: float, half: torch.dtype, small: bool = False
) -> Iterator[tuple[str, Figures]]:
    """Measure all sides with the bench, one after the other, the first of the profile last.

    Args:
        profile: model, lengths, requests and pool.
        requests_per_s: on average; they come at random.
        half: the device's 16-bit type.
        small: a model that is made on the spot, not the profile's.

    """
    with tempfile.TemporaryDirectory() as made:
        folder, options = Path(made), ["--dtype", "float32", "--enforce-eager"]
        bytes_per_slot = 2 * 32 * 4
        if small:
            write_model(folder, profile.max_model_len)
        else:
            folder, options = folder_of(profile.model, half == torch.bfloat16)
            bytes_per_slot = MODELS[profile.model].bytes_per_slot
        requests = [*profile.requests(), "--request-rate", str(requests_per_s)]
        for side in reversed(profile.sides):
            flags = [*options, *profile.engine(side, bytes_per_slot)]
            with Server(folder, Path(made) / f"{side.name}.log", flags) as server:
                yield side.name, _figures(_bench(server, requests, Path(made) / "figures.json"))


def _bench(server: Server, requests: list[str], out: Path) -> Mapping[str, Any]:
    command = [*VLLM, "bench", "serve", "--base-url", server.url, "--model", server.model]
    command += [*requests, "--ignore-eos", "--percentile-metrics", "ttft,itl"]
    command += ["--metric-percentiles", ",".join(map(str, PERCENTILES))]
    command += ["--save-result", "--result-dir", str(out.parent), "--result-filename", out.name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command} failed:\n{done.stderr[-4000:]}")
    return dict(json.loads(out.read_text()))


def _figures(found: Mapping[str, Any]) -> Figures:
    times = {
        f"{name}_p{percentile}_ms": float(found[f"p{percentile}_{name}_ms"])
        for name in ("ttft", "itl")
        for percentile in PERCENTILES
    }
    return {"completed": found["completed"], "tokens_per_s": found["output_throughput"], **times}
