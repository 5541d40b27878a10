# SPDX-License-Identifier: Apache-2.0
"""Run all checks for a machine with a GPU in one command; a table comes last.

Usage::

    python -m benchmarks.gpu [--minutes 8] [--all] [--small] [--parts engines kernels graphs ...]

Each part runs in a process of its own, within a time of its own, the most telling first: one that
crashes, hangs or poisons the device fails alone, and what was found before is in the CSVs.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from triton.errors import TritonError

from benchmarks.gpu import kernels, latency, roofline, speed
from benchmarks.gpu.engines import COMBINED, COMPARED, ROOT, Check, compare, control, retained
from benchmarks.record import append_rows, machine_name
from vllm_h2o.kernels.triton.kernels import PromptAttention

KINDS = ("kernels", "engines", "graphs", "speed", "throughput", "latency")
"""Kinds of parts."""
PROFILES = ("OPT-16-512+512",)
MORE_PROFILES = (*PROFILES, "8B-1/8", "free-100", "OPT-80-512+512")
"""Pools of cards of 16, 24 and 80 GB, and one that is free."""
REQUESTS_PER_S = 8.0
"""Rate at which the servers get requests while latencies are measured."""
BROKEN = (
    RuntimeError, ValueError, AssertionError, AttributeError, TypeError, LookupError, ImportError,
    ArithmeticError, OSError, TritonError,
)  # fmt: skip
"""Errors of a device, a build of vLLM or a kernel; whatever else ends a part is found by the
status of its process."""
DOES_NOT_HOLD = 3
"""Status of a process whose part ran to its end, and some of whose checks failed."""


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
    attentions: dict[str, PromptAttention | None] = {"own": None}
    if (fast := flash(device, size)) is not None:
        attentions["FlashAttention"] = fast
    for name, attention in attentions.items():
        for later in (False, True):
            where = "later chunks" if later else "first chunks"
            for what, error, allowed in kernels.check_prompt(size, device, attention, later):
                yield f"{label}: prompt ({name}, {where}), {what}", error, allowed


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
        row: dict[str, object]
        row = {"machine": self.machine, "torch": torch.__version__, "what": what}
        row |= {"figure": figure, "at_most": allowed, "holds": int(holds(check))}
        append_rows(self.out / "gpu-checks.csv", [row])

    def speed(self, size: kernels.Size, device: torch.device) -> Iterator[Check]:
        """Figures of one size, printed and kept; nothing is asked of them here."""
        figures = speed.speed(size, device, flash(device, size))
        figures["decode_of_copy_predicted"] = predicted(self.machine, size)
        row = {"machine": self.machine, "torch": torch.__version__, **vars(size), **figures}
        append_rows(self.out / "gpu-kernels.csv", [row])
        print({name: round(value, 3) for name, value in figures.items()}, flush=True)
        yield from ()

    def latency(self, small: bool) -> Iterator[Check]:
        """Latencies of each side, printed and kept; every request must be answered."""
        profile = latency.SMALL if small else latency.PROFILE
        for name, figures in latency.measure(profile, REQUESTS_PER_S, small):
            row: dict[str, object]
            row = {"machine": self.machine, "vllm": version("vllm"), "profile": profile.id}
            row |= {"side": name, "requests_per_s": REQUESTS_PER_S, **figures}
            append_rows(self.out / "gpu-latency.csv", [row])
            print(row, flush=True)
            missing = profile.num_prompts - figures["completed"]
            yield f"latency: {profile.id}, {name}: requests that were not answered", missing, 0.0

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


def holds(check: Check) -> bool:
    """Whether a figure is no more than it may be; NaN never is."""
    return check[1] <= check[2]


def line(check: Check) -> str:
    """One line of the table."""
    what, figure, allowed = check
    return f"{'ok  ' if holds(check) else 'FAIL'} {figure:9.3g} (at most {allowed:.3g})  {what}"


@dataclass(frozen=True)
class Part:
    """A part of the checks, which runs in one process.

    Args:
        name: its kind, and what it is about.
        seconds: after which it is ended.
        action: its checks.

    """

    name: str
    seconds: int
    action: Callable[[Report, torch.device], Iterable[Check]]

    @property
    def kind(self) -> str:
        """One of :data:`KINDS`."""
        return self.name.split(":")[0]


def parts(small: bool, every: bool) -> list[Part]:
    """The most telling first.

    Args:
        small: for a CPU, where kernels are interpreted.
        every: engines, sizes and profiles that take long, too.

    """
    if small:
        found = [_kernels(size) for size in kernels.SMALL]
        found += _engines("llama", list(COMPARED)[:2], small)
        return [*found, _retained("float32", small), _latency(small)]
    names = list(COMPARED)
    found = [_kernels(size) for size in kernels.ODD[:2]]
    found += [_retained(dtype, small) for dtype in ("float32", "bfloat16")]
    found += [_graph(size) for size in kernels.REAL[:2]]
    found += [_speed(size) for size in speed.SIZES]
    found += [_throughput(profile) for profile in (MORE_PROFILES if every else PROFILES)]
    found += _engines("llama", names if every else names[:4], small)  # two starts for each
    found += [_latency(small)]
    found += [_kernels(size) for size in (*kernels.ODD[2:], *kernels.REAL)]
    found += [_graph(size) for size in kernels.REAL[2:]]
    long = Part("kernels: 128k tokens", 120, lambda _, device: kernels.check_long(device))
    # OPT has no rotary embeddings, which h2o2's rotated queries need.
    plain = [name for name, (one, _) in COMPARED.items() if one != COMBINED]
    return [*found, long, *(_engines("opt", plain, small) if every else ())]


def _kernels(size: kernels.Size) -> Part:
    return Part(f"kernels: {size}", 120, lambda _, device: check_kernels(device, size))


def _graph(size: kernels.Size) -> Part:
    return Part(f"graphs: {size}", 60, lambda _, device: kernels.check_graph(size, device))


def _speed(size: kernels.Size) -> Part:
    return Part(f"speed: {size}", 90, lambda report, device: report.speed(size, device))


def _throughput(profile: str) -> Part:
    return Part(f"throughput: {profile}", 420, lambda report, _: report.throughput([profile]))


def _latency(small: bool) -> Part:
    return Part("latency", 420, lambda report, _: report.latency(small))


def _retained(dtype: str, small: bool) -> Part:
    def action(report: Report, _: torch.device) -> Iterator[Check]:
        return retained(report.out, small, dtype)

    return Part(f"engines: retained sets, {dtype}", 300, action)


def _engines(shape: str, names: Sequence[str], small: bool) -> list[Part]:
    """Pairs of engines, and the control."""
    actions = {name: partial(compare, small=small, shape=shape, name=name) for name in names}
    actions["control"] = partial(control, small=small, shape=shape)

    def part(name: str, action: Callable[..., Iterator[Check]]) -> Part:
        return Part(f"engines: {shape}, {name}", 300, lambda report, _: action(report.out))

    return [part(*each) for each in actions.items()]


def run_part(name: str, chosen: Iterable[Part], out: Path, small: bool) -> bool:
    """One part, here; whether all of it holds."""
    (part,) = (part for part in chosen if part.name == name)
    device = torch.device("cpu" if small else "cuda")
    report = Report(machine_name() if small else torch.cuda.get_device_name(), out)
    report.run(part.name, lambda: part.action(report, device))
    return all(map(holds, report.checks))


def run_all(
    chosen: Sequence[Part], arguments: Sequence[str], out: Path, minutes: float
) -> list[str]:
    """Each in a process; what fails, by name.

    Args:
        chosen: the parts, in their order.
        arguments: of this command, for the processes.
        out: folder of the CSVs, and of what engines say.
        minutes: when they are over, no part is begun, and the one that runs is ended.

    """
    begin, failed = time.monotonic(), []
    with tempfile.TemporaryDirectory() as models:  # made once, for all parts
        for part in chosen:
            seconds = min(part.seconds, 60 * minutes - (time.monotonic() - begin))
            if seconds <= 0:
                print(f"not begun, the time is over: {part.name}", flush=True)
                continue
            command = [sys.executable, "-m", "benchmarks.gpu", *arguments, "--part", part.name]
            status, what = ended(command, seconds, {**os.environ, "TMPDIR": models})
            if what:
                Report("", out).add((f"{part.name}{what}", math.inf, 0.0))
            if status:
                failed.append(f"{part.name}{what}")
    return failed


def ended(command: list[str], seconds: float, environment: dict[str, str]) -> tuple[int, str]:
    """Status of a process with a time limit; and why, if its checks are not the reason."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        status = process.wait(seconds)
        return status, "" if status in (0, DOES_NOT_HOLD) else f": ended with status {status}"
    except subprocess.TimeoutExpired:
        return 1, f": ended after {seconds:.0f} seconds"
    finally:
        # Whatever ends it, or this command: engines that it started, too.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    """Run the parts; exit with 1 when a check fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, interpreted")
    parser.add_argument("--all", action="store_true", help="every engine and profile")
    parser.add_argument("--minutes", type=float, default=8.0, help="end then (8)")
    parser.add_argument("--parts", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--part", help="run this one alone, in this process")
    args = parser.parse_args()
    if not args.small and not torch.cuda.is_available():
        sys.exit(
            f"gpu-check: PyTorch {torch.__version__} finds no GPU. Run it on a machine with one."
        )
    args.out.mkdir(parents=True, exist_ok=True)
    every = parts(args.small, args.all)
    if args.part:
        sys.exit(0 if run_part(args.part, every, args.out, args.small) else DOES_NOT_HOLD)
    chosen = [part for kind in args.parts for part in every if part.kind == kind]
    if tuple(args.parts) == KINDS:
        chosen = every
    arguments = [flag for flag, on in (("--small", args.small), ("--all", args.all)) if on]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    failed = run_all(chosen, [*arguments, "--out", str(args.out)], args.out, args.minutes)
    print("\n".join(["", *(f"FAIL {name}" for name in failed)]))
    print(f"{len(failed)} parts fail; each check is in {args.out / 'gpu-checks.csv'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
