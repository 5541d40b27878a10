# SPDX-License-Identifier: Apache-2.0
"""A server under a mixed load for minutes, its pages counted at every step; then it is killed.

Usage::

    python -m benchmarks.soak [--short] [--mode prompt_end] [--policy snapkv] [--seconds 900]
        [--requests N] [--csv F] [--log FOLDER]

The exit status is 0 when nothing was wrong; what was is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.record import append_rows, machine_name
from benchmarks.soak import verdict
from benchmarks.soak.adapters import STEADY, VERSIONS, write_adapters
from benchmarks.soak.audit import Figures, plant, read
from benchmarks.soak.canaries import CANARIES
from benchmarks.soak.chaos import Witness, kill
from benchmarks.soak.load import Load, Mode, Outcome, Shape
from benchmarks.soak.server import PAGE, Server, write_model

BUDGET = 128
POLICIES = {"snapkv": "--enable-prefix-caching", "h2o": "--no-enable-prefix-caching"}
"""By policy: whether requests share the pages of a common prefix."""
ALL = frozenset(canary.name for canary in CANARIES)
MODES = {
    "prompt_end": Mode(),
    "adapters": Mode(
        (),
        ("--enable-lora", "--max-loras=2", "--max-lora-rank=8", "--no-enable-prefix-caching"),
        repeats=ALL.union(VERSIONS),
        adapters=True,
        # Measured in one process: 1,059 MiB after 400 requests with an adapter, 1,337 after 2,000.
        growth_mib=170,
    ),
    "pressure": Mode(
        ("--kv-policy-config.eviction=pressure",),
        ("--no-enable-prefix-caching",),
        happens="vllm:kv_policy_pressure_packs_total",
        repeats=frozenset({"within the budget", "all is kept", "beams"}),
    ),
    "evict_every": Mode(("--kv-policy-config.evict_every=16",)),
    "continuation": Mode(
        ("--kv-policy-config.continuation=true",),
        happens="vllm:kv_policy_continuation_hits_total",
        # The first begins like other prompts, so it may continue from one of them, and each beam
        # continues from what the one before has left.
        repeats=ALL - {"past the budget", "beams"},
    ),
    "drafts": Mode(
        ("--kv-policy-config.evict_every=16",),
        (
            "--speculative-config.method=ngram",
            "--speculative-config.num_speculative_tokens=4",
            "--speculative-config.prompt_lookup_max=4",
            "--speculative-config.prompt_lookup_min=1",
        ),
        happens="vllm:spec_decode_num_accepted_tokens_total",
        # On a CPU stock vLLM 0.32 itself gives greedy requests with drafts other tokens when they
        # share a batch with sampled ones (rejection_random_sample_kernel).
        greedy=True,
    ),
}
"""When the policy evicts; see docs/options.md for each."""
SHORT = Shape(
    seconds=240, requests=200, clients=8, max_model_len=1024, pages=52, long_prompt=900,
    burst=24, least_requests=100, growth_mib=1500,
)  # fmt: skip
LONG = Shape(
    seconds=900, requests=0, clients=16, max_model_len=12288, pages=420, long_prompt=10_000,
    burst=120, least_requests=2000, growth_mib=20,
)  # fmt: skip
DYING = CANARIES[1]
"""The request in progress when a process is killed."""


@dataclass
class Report:
    """A soak.

    Args:
        shape: its sizes.
        mode: a key of :data:`MODES`.
        policy: a key of :data:`POLICIES`.
        outcome: of the load.
        figures: of the audit, after the load.
        usage: share of the pool that vLLM says is in use, after the load.
        happened: what the mode's metric says; 0 where it has none.
        deaths: by the role of the killed process: with the policy, and stock vLLM.
        expected: the answer that was being given at each death.

    """

    shape: Shape
    mode: str
    policy: str
    outcome: Outcome
    figures: Figures
    usage: float
    happened: float
    deaths: dict[str, tuple[Witness, Witness]]
    expected: str

    def faults(self) -> Iterator[str]:
        """All that is wrong."""
        mode = MODES[self.mode]
        preempted = self.figures.preempted
        yield from verdict.of_load(self.outcome, self.shape, preempted, mode.repeats)
        yield from verdict.of_pages(self.figures, self.usage)
        if mode.happens and not self.happened:
            yield f"{mode.happens} is 0: nothing of what {self.mode} is about has happened"
        for ours, stock in self.deaths.values():
            yield from verdict.of_death(ours, stock, self.expected)

    def row(self) -> dict[str, Any]:
        """The figures, as the CSV has them."""
        outcome, figures = self.outcome, self.figures
        sent: Counter[str] = Counter()
        for (kind, result), count in outcome.counts.items():
            sent[result] += count
            sent[kind] += count
        compared = verdict.untouched(outcome, figures.preempted, MODES[self.mode].repeats)
        first, last = outcome.memory[0][1], outcome.memory[-1][1]
        memory = {
            f"{role}_{name}": round(value, 2)
            for role in ("server", "engine", "worker")
            for name, value in (
                ("mib_at_start", first[role] / verdict.MIB),
                ("mib_at_end", last[role] / verdict.MIB),
                ("mib_per_1000_requests", verdict.growth(outcome.memory, role)),
            )
        }
        results = ("answered", "left", "refused with 400", "refused with 404")
        return {
            "machine": machine_name(),
            "vllm": version("vllm"),
            "torch": version("torch"),
            "mode": self.mode,
            "policy": self.policy,
            "seconds": round(outcome.seconds),
            "requests": outcome.num_requests,
            **{result.replace(" ", "_"): sent[result] for result in results},
            "surprises": len(outcome.surprises),
            "long_prompts": sent["long"],
            "longest_prompt": self.shape.long_prompt,
            "steps": figures.steps,
            "checks": figures.checks,
            "preemptions": len(figures.preempted),
            "resumed_in_chunks": figures.resumed,
            "happened": round(self.happened),
            "pool_pages": figures.total,
            "peak_pages": figures.peak_held,
            "pages_held_at_end": figures.held,
            "canaries": len(outcome.canaries),
            "canaries_compared": len(compared),
            "canaries_different": sum(not same for _, same in compared),
            **memory,
            "killed": " ".join(self.deaths),
            "faults": len(list(self.faults())),
        }


def flags(shape: Shape, policy: str) -> list[str]:
    """Options of ``vllm serve``, the same for stock vLLM as for the policy."""
    return [
        POLICIES[policy],
        "--dtype=float32",
        "--enforce-eager",
        "--scheduling-policy=priority",
        f"--block-size={PAGE}",
        f"--max-model-len={shape.max_model_len}",
        "--max-num-batched-tokens=1024",
        f"--num-gpu-blocks-override={shape.pages}",
        "--enable-auto-tool-choice",
        "--tool-call-parser=hermes",
    ]


def run(shape: Shape, mode: str, policy: str, folder: Path, killed: Sequence[str]) -> Report:
    """The whole soak.

    Args:
        shape: its sizes.
        mode: a key of :data:`MODES`.
        policy: a key of :data:`POLICIES`.
        folder: takes the model and the logs.
        killed: roles of processes to kill, each in a server of its own, and stock vLLM's likewise.

    """
    model, audit = folder / "model", folder / "audit"
    write_model(model, shape.max_model_len)
    plant(audit)
    stock, dying = [*flags(shape, policy), *MODES[mode].engine], DYING.body
    adapters = write_adapters(model, folder) if MODES[mode].adapters else {}
    if adapters:
        stock.append(f"--lora-modules={STEADY}={adapters[STEADY]}")
        dying = {**dying, "model": STEADY}
    ours = [*stock, f"--kv-policy={policy}", f"--kv-policy-config.budget={BUDGET}"]
    ours += MODES[mode].policy
    deaths: dict[str, Witness] = {}
    with Server(model, folder / f"{policy}.log", ours, audit) as server:
        load = Load(server, shape, MODES[mode].greedy, adapters)
        outcome = asyncio.run(load.run())
        figures, usage = _at_rest(server, audit)
        happened = server.metric(MODES[mode].happens) if MODES[mode].happens else 0.0
        if killed:
            deaths[killed[0]] = asyncio.run(kill(server, killed[0], dying))
    pairs = {}
    for role in killed:
        if role not in deaths:
            with Server(model, folder / f"{policy}-{role}.log", ours) as server:
                deaths[role] = asyncio.run(kill(server, role, dying))
        with Server(model, folder / f"stock-{role}.log", stock) as server:
            pairs[role] = deaths[role], asyncio.run(kill(server, role, dying))
    expected = load.expected[DYING.name]
    return Report(shape, mode, policy, outcome, figures, usage, happened, pairs, expected)


def _at_rest(server: Server, audit: Path) -> tuple[Figures, float]:
    """The audit and vLLM's own metric, when nothing is left to be done: at once, or it is wrong."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        busy = sum(server.metric(f"vllm:num_requests_{what}") for what in ("running", "waiting"))
        if not busy and not read(audit).requests:
            break
        time.sleep(0.5)
    return read(audit), server.metric("vllm:kv_cache_usage_perc")


def main() -> int:
    """Run it, print what was wrong, append the row."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--short", action="store_true", help="200 requests, smaller ones")
    parser.add_argument(
        "--policy", choices=tuple(POLICIES), default="snapkv",
        help="snapkv, with prefix caching (default), or h2o, without it",
    )  # fmt: skip
    parser.add_argument("--mode", choices=tuple(MODES), default="prompt_end", help="of eviction")
    parser.add_argument("--seconds", type=float, default=None, help="of load at most (900)")
    parser.add_argument("--requests", type=int, default=None, help="to send at most (no end)")
    parser.add_argument("--csv", type=Path, default=None, help="append the figures to it")
    parser.add_argument("--log", type=Path, default=None, help="a new folder for models and logs")
    args = parser.parse_args()
    shape = SHORT if args.short else LONG
    given = {"seconds": args.seconds, "requests": args.requests}
    shape = replace(shape, **{name: value for name, value in given.items() if value})
    shape = replace(shape, growth_mib=shape.growth_mib + MODES[args.mode].growth_mib)
    with tempfile.TemporaryDirectory(prefix="vllm-h2o-soak-") as scratch:
        folder = args.log or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        killed = ("worker",) if args.short else ("worker", "engine")
        report = run(shape, args.mode, args.policy, folder, killed)
    row, faults = report.row(), list(report.faults())
    for name, value in row.items():
        print(f"{name:30} {value}")
    for role, (ours, stock) in report.deaths.items():
        print(f"{role} killed: {ours.death}\n{'stock vLLM':>{len(role) + 7}}: {stock.death}")
    if args.csv:
        append_rows(args.csv, [row])
    print(*(f"wrong: {fault}" for fault in faults), sep="\n", file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
