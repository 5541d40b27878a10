# SPDX-License-Identifier: Apache-2.0
"""P8: servers under Poisson arrivals: pressure, stock vLLM and prompt_end, at rate after rate.

Usage::

    python -m benchmarks.throughput.serve [--rates 0.5 1.0] [--seconds 40] [--out FOLDER]

vLLM's own ``vllm bench serve`` sends random prompts to real ``vllm serve`` processes, one for each
side, in the same memory: four whole sequences. The sides take turns at each rate, with the same
prompts and the same arrivals.

What is *in time* (the SLO): a request's first token within ``SCALE_TTFT`` times, and its time per
further token within ``SCALE_TPOT`` times, what they are at most (p99) when stock vLLM serves one
request after the other. A rate is *met* when at least ``ATTAINED`` of its requests are in time; a
side is sent no more once fewer than ``LOST`` are.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.record import append_rows, machine_name
from benchmarks.soak.server import Server
from benchmarks.throughput.models import MODELS, folder_of
from benchmarks.throughput.profiles import Profile, Side, pressed
from benchmarks.throughput.runs import ENVIRONMENT, ON_CPU, ROOT

RESULTS = ROOT / "benchmarks" / "results"
SCALE_TTFT, SCALE_TPOT, ATTAINED, LOST = 10.0, 4.0, 0.9, 0.5
PROFILE = pressed(4, (64, 192), 0, 0.2, "smollm2-float32")
RATES = (0.25, 0.35, 0.5, 0.65)
SECONDS = 32.0
UNLOADED = 4
"""Requests one after the other, for the SLO."""
FIGURES = ("ttft", "tpot", "itl")


@dataclass(frozen=True)
class Limits:
    """The SLO of a request.

    Args:
        ttft: milliseconds to the first token.
        tpot: milliseconds for each further one, on average.

    """

    ttft: float
    tpot: float


def flags(profile: Profile, side: Side) -> list[str]:
    """Return the options of ``vllm serve``."""
    options: dict[str, Any] = {
        "--max-model-len": profile.max_model_len,
        "--block-size": profile.block_size,
        "--num-gpu-blocks-override": profile.num_blocks(side, MODELS[profile.model].bytes_per_slot),
        **side.policy_options(),
    }
    return [*(f"{name}={value}" for name, value in options.items()), "--no-enable-prefix-caching"]


def bench(url: str, profile: Profile, rate: float, count: int, limits: Limits | None) -> Any:
    """Send ``count`` requests with ``vllm bench serve``; without limits, one after the other."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    options = {
        "--base-url": url,
        "--model": folder_of(profile.model)[0],
        "--dataset-name": "random",
        "--random-input-len": profile.input_len,
        "--random-output-len": profile.output_len,
        "--num-prompts": count,
        "--request-rate": rate,
        "--num-warmups": 1,
        "--percentile-metrics": ",".join(FIGURES),
        "--metric-percentiles": "50,99",
        "--seed": round(1000 * rate) if limits else 0,
    }
    words = [str(part) for pair in options.items() for part in pair]
    words += ["--ignore-eos", "--disable-tqdm"]
    if limits:
        words += ["--goodput", f"ttft:{limits.ttft}", f"tpot:{limits.tpot}"]
    else:
        words += ["--max-concurrency", "1"]
    found = serve.main(parser.parse_args(words))
    if found["completed"] != count:
        raise RuntimeError(f"{found['completed']} of {count} requests were answered by {url}")
    return found


def limits_of(url: str, profile: Profile, count: int) -> Limits:
    """From stock vLLM without any other request."""
    found = bench(url, profile, float("inf"), count, None)
    return Limits(
        round(SCALE_TTFT * found["p99_ttft_ms"], 1), round(SCALE_TPOT * found["p99_tpot_ms"], 1)
    )


def row_of(
    profile: Profile, side: Side, rate: float, limits: Limits, found: Mapping[str, Any]
) -> dict[str, Any]:
    """One side at one rate."""
    in_time = found["request_goodput"] * found["duration"] / found["completed"]
    return {
        "profile": "P8",
        "side": side.name,
        "machine": machine_name(),
        "vllm": version("vllm"),
        "model": profile.model,
        "input_len": profile.input_len,
        "output_len": profile.output_len,
        "pool_pages": profile.num_blocks(side, MODELS[profile.model].bytes_per_slot),
        "page_tokens": profile.block_size,
        "budget": side.budget,
        "slo_ttft_ms": limits.ttft,
        "slo_tpot_ms": limits.tpot,
        "rate": rate,
        "requests": found["completed"],
        "seconds": round(found["duration"], 2),
        "in_time": round(in_time, 4),
        "goodput": round(rate * in_time, 4),
        "output_tokens_per_s": round(found["output_throughput"], 2),
        **{
            f"{name}_p{p}_ms": round(found[f"p{p}_{name}_ms"], 1)
            for name in FIGURES
            for p in (50, 99)
        },
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format all rates as Markdown."""
    lines = [
        "| rate | side | in time | TTFT p50, p99 (ms) | TPOT p50, p99 | ITL p50, p99 | preempted |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        pairs = (f"{row[f'{n}_p50_ms']:.0f}, {row[f'{n}_p99_ms']:.0f}" for n in FIGURES)
        lines.append(
            f"| {row['rate']} | {row['side']} | {row['in_time']:.0%} | {' | '.join(pairs)} "
            f"| {row['preemptions']} |"
        )
    return "\n".join(lines)


def met(rows: Sequence[Mapping[str, Any]], side: str) -> float:
    """The highest rate up to which all rates are met; 0 when the first is not."""
    best = 0.0
    for row in sorted((r for r in rows if r["side"] == side), key=lambda r: float(r["rate"])):
        if float(row["in_time"]) < ATTAINED:
            break
        best = float(row["rate"])
    return best


def main() -> None:
    """Start the servers, send, append each row, draw the chart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="requests a second")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of arrivals at each rate")
    parser.add_argument("--unloaded", type=int, default=UNLOADED, help="requests for the SLO")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV and the chart")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    csv, run, rows = args.out / "serve-cpu.csv", time.strftime("%Y-%m-%dT%H:%M"), []
    folder, options = folder_of(PROFILE.model)
    options.append("--enforce-eager")
    with tempfile.TemporaryDirectory() as logs, ExitStack() as stack:
        servers = {
            side: stack.enter_context(
                Server(
                    folder,
                    Path(logs) / f"{number}.log",
                    [*options, *flags(PROFILE, side)],
                    environment={**ENVIRONMENT, **ON_CPU},
                )
            )
            for number, side in enumerate(PROFILE.sides)
        }
        stock = next(server for side, server in servers.items() if side.budget is None)
        limits = limits_of(stock.url, PROFILE, args.unloaded)
        for rate in args.rates:
            for side, server in list(servers.items()):
                before = server.metric("vllm:num_preemptions_total")
                found = bench(server.url, PROFILE, rate, round(rate * args.seconds), limits)
                preempted = server.metric("vllm:num_preemptions_total") - before
                row = {**row_of(PROFILE, side, rate, limits, found), "preemptions": int(preempted)}
                rows.append({**row, "run": run})
                append_rows(csv, rows[-1:])
                if row["in_time"] < LOST:
                    del servers[side]
    print(table(rows))
    print(json.dumps({side.name: met(rows, side.name) for side in PROFILE.sides}))
    from benchmarks.throughput.chart import draw_goodput

    draw_goodput(csv, args.out / "serve-cpu")


if __name__ == "__main__":
    main()
