"""All that a machine with a GPU has to prove, in one command; a table comes last.

Usage::

    python -m benchmarks.gpu [--all] [--small] [--parts kernels graphs speed engines throughput]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import torch
from triton.errors import TritonError

from benchmarks.gpu import kernels, roofline
from benchmarks.gpu.engine import LENGTHS, MAX_MODEL_LEN
from benchmarks.record import append_rows, machine_name
from vllm_h2o.kernels.triton.kernels import PromptAttention

ROOT = Path(__file__).parents[2]
PARTS = ("kernels", "graphs", "speed", "engines", "throughput")
PROFILES = ("OPT-16-512+512",)
MORE_PROFILES = (*PROFILES, "8B-1/8", "free-100")
BROKEN = (
    RuntimeError, ValueError, AssertionError, TypeError, LookupError, ImportError, TritonError
)  # fmt: skip
"""What a device, a build of vLLM or a kernel may raise."""
Check = tuple[str, float, float]
"""What, the figure, and its maximum."""


def flash(device: torch.device, size: kernels.Size) -> PromptAttention | None:
    """vLLM's FlashAttention where the device has it, and for this type."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 8:
        return None
    if size.dtype == torch.float32:
        return None
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    from vllm_h2o.worker.flash import FlashPrompt

    version = get_flash_attn_version(head_size=size.head_size)
    return None if version is None else FlashPrompt(flash_attn_varlen_func, version)


def check_kernels(device: torch.device, size: kernels.Size) -> Iterator[Check]:
    """Decode and prompts of one size."""
    label = f"{size.requests}x{size.tokens} {size.num_heads}/{size.num_kv_heads} x {size.head_size}"
    label = f"{label}, pages of {size.block_size}, {size.dtype}"
    for what, error, allowed in kernels.check_decode(size, device):
        yield f"{label}: decode, {what}", error, allowed
    attentions = {"own": None}
    if (fast := flash(device, size)) is not None:
        attentions["FlashAttention"] = fast
    for name, attention in attentions.items():
        for later in (False, True):
            where = "later chunks" if later else "first chunks"
            for what, error, allowed in kernels.check_prompt(size, device, attention, later):
                yield f"{label}: prompt ({name}, {where}), {what}", error, allowed


@lru_cache
def tokens_of(shape: str, *options: str) -> list[list[int]]:
    """Of one engine, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tokens.json"
        command = [sys.executable, "-m", "benchmarks.gpu.engine", shape, str(out), *options]
        # An interpreter of Triton is for the kernels' check alone.
        environment = {**os.environ, "TRITON_INTERPRET": "0"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{command} failed:\n{done.stderr[-4000:]}")
        return list(json.loads(out.read_text()))


def apart(one: list[list[int]], other: list[list[int]]) -> float:
    """The fraction of tokens that follow the first difference, mean over requests."""
    fractions = []
    for a, b in zip(one, other, strict=True):
        same = next((i for i in range(len(a)) if a[i] != b[i]), len(a))
        fractions.append(1 - same / len(a))
    return sum(fractions) / len(fractions)


WHOLE, EVICTING = ("--policy-budget", "1.0"), ("--policy-budget", "0.125")
SECOND_PASS = (*EVICTING, "--policy", "h2o2")
COMPARED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "100 % against stock": ((), WHOLE),
    "1/8, graphs against eager": (EVICTING, (*EVICTING, "--eager")),
    "1/8, V2 against V1": (EVICTING, (*EVICTING, "--v1")),
    "1/8, h2o2, graphs against eager": (SECOND_PASS, (*SECOND_PASS, "--eager")),
}


def check_engines(small: bool, shape: str, names: Iterable[str]) -> Iterator[Check]:
    """Tokens of pairs of engines; and that a budget shows in them at all."""
    size = ("--requests", "4", "--tokens", "12", "--dtype", "float32") if small else ()
    # Kernels that round differently in half precision differ at a near tie, sooner or later.
    allowed = 0.0 if small else 0.4
    for name in names:
        one, other = (tokens_of(shape, *size, *options) for options in COMPARED[name])
        yield f"{shape}: {name}: tokens from the first that differs", apart(one, other), allowed
    whole, evicted = (tokens_of(shape, *size, *options) for options in (WHOLE, EVICTING))
    long = [i for i in range(len(whole)) if LENGTHS[i % len(LENGTHS)] > MAX_MODEL_LEN / 8]
    same = 1 - apart([whole[i] for i in long], [evicted[i] for i in long])
    yield f"{shape}: control: tokens that 1/8 leaves as they are", same, 0.7


@dataclass
class Report:
    """Checks as they come, one by one, and their table.

    Args:
        machine: the device's name.
        out: folder of the CSVs.

    """

    machine: str
    out: Path
    checks: list[Check] = field(default_factory=list)

    def run(self, what: str, action: Callable[[], Iterable[Check]]) -> None:
        """Add the checks of an action; one that raises is a check that fails."""
        try:
            for check in action():
                self.add(check)
        except BROKEN as error:
            traceback.print_exc()
            self.add((f"{what}: {type(error).__name__}", math.inf, 0.0))

    def add(self, check: Check) -> None:
        """One check: printed, and kept."""
        self.checks.append(check)
        print(line(check), flush=True)
        what, figure, allowed = check
        row = {"machine": self.machine, "torch": torch.__version__, "what": what}
        row |= {"figure": figure, "at_most": allowed, "holds": int(holds(check))}
        append_rows(self.out / "gpu-checks.csv", [row])

    def speed(self, size: kernels.Size, device: torch.device) -> Iterator[Check]:
        """Figures of one size, printed and kept; nothing is asked of them here."""
        figures = kernels.speed(size, device, flash(device, size))
        figures["decode_of_copy_predicted"] = predicted(self.machine, size)
        row = {"machine": self.machine, "torch": torch.__version__, **vars(size), **figures}
        append_rows(self.out / "gpu-kernels.csv", [row])
        print({name: round(value, 3) for name, value in figures.items()}, flush=True)
        yield from ()

    def throughput(self, profiles: Sequence[str]) -> Iterator[Check]:
        """Profiles of benchmarks.throughput, which prints a table of its own."""
        command = [sys.executable, "-m", "benchmarks.throughput", "--device", "gpu", "--pairs", "1"]
        command += ["--out", str(self.out), "--only", *profiles]
        yield "throughput: exit status", float(subprocess.run(command, cwd=ROOT).returncode), 0.0


def predicted(machine: str, size: kernels.Size) -> float:
    """Share of a copy's rate that decoding reaches by the model; NaN where that says nothing."""
    device = roofline.device_of(machine)
    if device is None or size.dtype.itemsize != 2 or size.head_size != 128:
        return math.nan
    shape = roofline.Shape("", size.num_heads, size.num_kv_heads, size.head_size, 1, 0)
    return roofline.decode(device, shape, size.requests, size.tokens).share


def release() -> Iterable[Check]:
    """Give back memory that nothing holds any more."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return ()


def holds(check: Check) -> bool:
    """Whether a figure is no more than it may be; NaN never is."""
    return check[1] <= check[2]


def line(check: Check) -> str:
    """Of the table."""
    what, figure, allowed = check
    return f"{'ok  ' if holds(check) else 'FAIL'} {figure:9.3g} (at most {allowed:.3g})  {what}"


def main() -> None:
    """Run the parts; exit with 1 when a check fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, interpreted")
    parser.add_argument("--all", action="store_true", help="every engine and profile: 20 minutes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu" if args.small else "cuda")
    report = Report(machine_name() if args.small else torch.cuda.get_device_name(), args.out)
    print(report.machine, "torch", torch.__version__, flush=True)
    work: dict[str, list[tuple[str, Callable[[], Iterable[Check]]]]] = {part: [] for part in PARTS}
    for size in kernels.SMALL if args.small else (*kernels.REAL, *kernels.ODD):
        work["kernels"].append((str(size), partial(check_kernels, device, size)))
    if not args.small:
        work["kernels"].append(("128k tokens", partial(kernels.check_long, device)))
        for size in kernels.REAL:
            work["graphs"].append((str(size), partial(kernels.check_graph, size, device)))
            work["speed"].append((str(size), partial(report.speed, size, device)))
        profiles = MORE_PROFILES if args.all else PROFILES
        work["throughput"].append(("throughput", partial(report.throughput, profiles)))
    for shape in ("llama", "opt") if args.all else ("llama",):
        # OPT has no rotary embeddings, which a second pass needs.
        names = [
            name for name, (one, _) in COMPARED.items() if shape == "llama" or one != SECOND_PASS
        ]
        compared = names if args.all else names[:2]
        work["engines"].append((shape, partial(check_engines, args.small, shape, compared)))
    for part in args.parts:
        for what, action in work[part]:
            report.run(f"{part}: {what}", action)
        # Engines in processes of their own ask for most of the device.
        report.run(f"{part}: freed", release)
    print("\n".join(["", *map(line, report.checks)]))
    held = sum(map(holds, report.checks))
    print(f"{held} of {len(report.checks)} checks hold on {report.machine}")
    sys.exit(0 if held == len(report.checks) else 1)


if __name__ == "__main__":
    main()
