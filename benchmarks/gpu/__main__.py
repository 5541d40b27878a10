"""All that a machine with a GPU has to prove, in one command; a table comes last.

Usage::

    python -m benchmarks.gpu [--small] [--parts kernels graphs engines speed throughput]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.gpu import kernels
from benchmarks.record import append_rows, machine_name
from vllm_h2o.kernels.triton.kernels import PromptAttention

ROOT = Path(__file__).parents[2]
PARTS = ("kernels", "graphs", "engines", "speed", "throughput")
PROFILES = ("OPT-16-512+512", "8B-1/8", "free-100")
Check = tuple[str, float, float]
"""What, the figure, and the most that it may be."""


def flash(device: torch.device) -> PromptAttention | None:
    """vLLM's FlashAttention where the device has it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 8:
        return None
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    from vllm_h2o.worker.flash import FlashPrompt

    version = get_flash_attn_version()
    return None if version is None else FlashPrompt(flash_attn_varlen_func, version)


def check_kernels(device: torch.device, sizes: Sequence[kernels.Size]) -> Iterator[Check]:
    """Every size, decode and prompt."""
    for size in sizes:
        label = f"{size.requests}x{size.tokens} {size.num_heads}/{size.num_kv_heads} {size.dtype}"
        fits = size.dtype != torch.float32
        for what, error, allowed in (
            *kernels.check_decode(size, device),
            *kernels.check_prompt(size, device, None),
            *(kernels.check_prompt(size, device, flash(device)) if fits else ()),
        ):
            yield f"{label}: {what}", error, allowed


def tokens_of(shape: str, *options: str, **environment: str) -> list[list[int]]:
    """Of one engine, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return _tokens_of(Path(folder) / "tokens.json", shape, *options, **environment)


def _tokens_of(out: Path, shape: str, *options: str, **environment: str) -> list[list[int]]:
    command = [sys.executable, "-m", "benchmarks.gpu.engine", shape, str(out), *options]
    # An interpreter of Triton is for the kernels' check alone.
    environment = {**os.environ, **environment, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command} failed:\n{done.stderr[-4000:]}")
    return list(json.loads(out.read_text()))


def check_engines(small: bool) -> Iterator[Check]:
    """Requests whose tokens differ: budget 100 % from stock, graphs from eager, V1 from V2."""
    size = ("--requests", "4", "--tokens", "12", "--dtype", "float32") if small else ()

    def differ(one: list[list[int]], other: list[list[int]]) -> float:
        return float(sum(a != b for a, b in zip(one, other, strict=True)))

    for shape in ("opt", "llama"):
        stock = tokens_of(shape, *size)
        # Two attention kernels round differently in half precision: a few near ties may turn.
        allowed = 0.0 if small else len(stock) / 4
        yield (
            f"{shape}: 100 % against stock",
            differ(stock, tokens_of(shape, *size, "--policy-budget", "1.0")),
            allowed,
        )
        evicting = (shape, *size, "--policy-budget", "0.125")
        graphs = tokens_of(*evicting)
        yield (
            f"{shape}: graphs against eager",
            differ(graphs, tokens_of(*evicting, "--eager")),
            allowed,
        )
        v1 = tokens_of(*evicting, VLLM_USE_V2_MODEL_RUNNER="0")
        yield f"{shape}: V2 against V1", differ(graphs, v1), allowed
    again = ("llama", *size, "--policy", "h2o_replay", "--policy-budget", "0.125")
    graphs = tokens_of(*again)
    eager = tokens_of(*again, "--eager")
    allowed = 0.0 if small else len(graphs) / 4
    yield "llama: h2o_replay, graphs against eager", differ(graphs, eager), allowed


def report(check: Check) -> bool:
    """Print one; whether it holds."""
    what, figure, allowed = check
    holds = figure <= allowed
    print(f"{'ok  ' if holds else 'FAIL'} {what}: {figure:.3g} (at most {allowed:.3g})", flush=True)
    return holds


def main() -> None:
    """Run the parts; exit with 1 when a check fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, interpreted")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    device = torch.device("cpu" if args.small else "cuda")
    sizes = kernels.SMALL if args.small else kernels.REAL
    machine = machine_name() if args.small else torch.cuda.get_device_name()
    print(machine, "torch", torch.__version__, flush=True)
    results: list[bool] = []
    if "kernels" in args.parts:
        results += [report(check) for check in check_kernels(device, sizes)]
    if "graphs" in args.parts and not args.small:
        results += [report(kernels.check_graph(size, device)) for size in sizes]
    if "engines" in args.parts:
        results += [report(check) for check in check_engines(args.small)]
    if "speed" in args.parts and not args.small:
        for size in sizes:
            figures = kernels.speed(size, device, flash(device))
            row = {"machine": machine, "torch": torch.__version__, **vars(size), **figures}
            append_rows(args.out / "gpu-kernels.csv", [row])
            print({name: round(value, 3) for name, value in figures.items()}, flush=True)
    if "throughput" in args.parts and not args.small:
        command = [sys.executable, "-m", "benchmarks.throughput", "--device", "gpu", "--pairs", "1"]
        command += ["--out", str(args.out), "--only", *PROFILES]
        results.append(subprocess.run(command, cwd=ROOT).returncode == 0)
    print(f"{sum(results)} of {len(results)} checks hold on {machine}")
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
