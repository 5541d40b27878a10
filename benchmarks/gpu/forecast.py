# SPDX-License-Identifier: Apache-2.0
"""Predict the profiles for GPUs: sequences at once, a step's time and bytes, tokens per second.

Usage::

    python -m benchmarks.gpu.forecast [--csv FILE]

The scheduler is played step by step, in pages: who is admitted, who grows, who is preempted and
computed again. :mod:`benchmarks.gpu.roofline` gives each step's time. The host's time is left out,
so small models and short steps come out too fast, on both sides. Of a policy only scores and
victims count, so ``h2o2`` is not predicted.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.gpu import roofline
from benchmarks.gpu.devices import DEVICES, MATRIX, Device
from benchmarks.gpu.roofline import Shape
from benchmarks.record import append_rows
from benchmarks.throughput.models import MODELS
from benchmarks.throughput.profiles import GPU, Profile, Side
from vllm_h2o.options.config import KVPolicyConfig

SHAPES = {
    "opt-6.7b": roofline.OPT,
    "opt-6.7b-long": roofline.OPT,
    "opt-30b": Shape("OPT-30B", 56, 56, 128, 48, 30.0e9),
    "llama-8b": roofline.LLAMA,
}
"""By names of ``models.MODELS``."""
MEMORY = {"H200": 141, "H100": 80, "A100-80GB": 80, "L4": 24}
"""GB of the cards in :data:`DEVICES`."""


@dataclass(frozen=True)
class Step:
    """One step of the scheduler.

    Args:
        decodes: sequences that decode.
        slots: that they hold, all together.
        prompts: tokens of each prompt that is computed, again after a preemption.

    """

    decodes: int
    slots: int
    prompts: tuple[int, ...]


@dataclass(frozen=True)
class Forecast:
    """One side of a profile.

    Args:
        sequences: that get a token in a step, on average.
        step_seconds: of the median step without a prompt.
        step_bytes: that the mean step reads and writes: weights, K, V, scores.
        seconds: of all requests.
        tokens_per_s: generated.

    """

    sequences: float
    step_seconds: float
    step_bytes: float
    seconds: float
    tokens_per_s: float


def capacity(profile: Profile, side: Side) -> int | None:
    """Slots that a sequence keeps after its prompt; None where it keeps all."""
    if side.budget is None:
        return None
    config = KVPolicyConfig(name=side.policy, budget=side.budget, **side.options)
    found = config.resolve(profile.max_model_len, profile.block_size).capacity
    return found if found < profile.input_len + profile.output_len else None


def schedule(profile: Profile, side: Side, limit: int, token_budget: int) -> Iterator[Step]:
    """Play the scheduler.

    Args:
        profile: whose requests come all at once.
        side: whose pool and budget.
        limit: sequences at once.
        token_budget: prompt tokens of a step; one prompt may have more.

    """
    most, size = capacity(profile, side), profile.block_size
    blocks = profile.num_blocks(side, MODELS[profile.model].bytes_per_slot)
    free = math.inf if blocks is None else blocks - 1
    last = profile.input_len + profile.output_len - 1  # the last token is not computed

    def pages(length: int) -> int:
        return -(-(length if most is None else min(length, most)) // size)

    waiting = deque([profile.input_len] * profile.num_prompts)  # lengths when computed
    running: list[int] = []
    while waiting or running:
        grown, admits = 0, True
        while grown < len(running):
            need = pages(running[grown] + 1) - pages(running[grown])
            if need <= free:
                free -= need
                running[grown] += 1
                grown += 1
            else:  # the last to come is computed again
                preempted = running.pop()
                free += pages(preempted)
                waiting.appendleft(preempted + 1)
                admits = False
        slots = sum(length if most is None else min(length, most) for length in running)
        decodes, prompts = len(running), list[int]()
        while admits and waiting and len(running) < limit:
            length = waiting[0]
            if -(-length // size) > free or (prompts and sum(prompts) + length > token_budget):
                break
            prompts.append(waiting.popleft())
            free -= pages(length)
            running.append(length)
        if not decodes and not prompts:
            raise ValueError(
                f"The pool of {profile.id} holds no whole prompt. Give it more tokens."
            )
        yield Step(decodes, slots, tuple(prompts))
        free += sum(pages(length) for length in running if length >= last)
        running = [length for length in running if length < last]


def forecast(device: Device, profile: Profile, side: Side) -> Forecast:
    """Predict one side."""
    shape, scored = SHAPES[profile.model], capacity(profile, side) is not None
    large = MEMORY[device.name] >= 75 and "A100" not in device.name
    limit, token_budget = (1024, 16384) if large else (256, 8192)  # vLLM's, by device
    steps = _played(profile.id, side.name, side.max_num_seqs or limit, token_budget)
    plain: list[float] = []
    seconds = moved = 0.0
    for step, number in steps.items():
        time = sum(_prompt(device, shape, length, scored) for length in step.prompts)
        if step.decodes:
            slots = step.slots // step.decodes
            decoding = _decode(device, shape, step.decodes, slots, scored)
            time += decoding
            moved += number * step.slots
            if not step.prompts:
                plain += [decoding] * number
        seconds += number * time
    total, decodes = steps.total(), sum(step.decodes * number for step, number in steps.items())
    per_slot = shape.num_layers * shape.num_kv_heads * (4 * shape.head_size + 8 * scored)
    tokens = profile.num_prompts * profile.output_len
    return Forecast(
        decodes / total,
        statistics.median(plain),
        2 * shape.parameters + per_slot * moved / total,
        seconds,
        tokens / seconds,
    )


@cache
def _played(profile_id: str, side_name: str, limit: int, token_budget: int) -> Counter[Step]:
    """How often each step comes: the same on every device with these limits."""
    profile = next(profile for profile in GPU if profile.id == profile_id)
    side = next(side for side in profile.sides if side.name == side_name)
    return Counter(schedule(profile, side, limit, token_budget))


@cache
def _decode(device: Device, shape: Shape, batch: int, slots: int, scored: bool) -> float:
    return roofline.step(device, shape, [slots] * batch, scored)


@cache
def _prompt(device: Device, shape: Shape, tokens: int, scored: bool) -> float:
    """Seconds of a prompt: products of all weights, attention, scores."""
    one = roofline.prompt(device, shape, tokens)
    products = 2 * shape.parameters * tokens / (MATRIX * device.flops)
    return products + shape.num_layers * (one.attention + (one.scores if scored else 0.0))


def fitting(device: Device) -> Iterator[Profile]:
    """The profiles whose weights and pools fit on the card."""
    return (profile for profile in GPU if profile.card <= MEMORY[device.name])


def rows(device: Device, profile: Profile) -> Iterator[dict[str, Any]]:
    """Predict a profile, a figure a row; a ratio has no side."""
    where = {"device": device.name, "profile": profile.id}
    sides = [side for side in profile.sides if side.budget is None or side.policy == "h2o"]
    found = {side.name: forecast(device, profile, side) for side in sides}
    ours, theirs = (found[side.name] for side in profile.sides[:2])
    ratio = ours.tokens_per_s / theirs.tokens_per_s
    if profile.figure == "step":
        ratio = theirs.step_seconds / ours.step_seconds
    yield {**where, "side": "", "figure": "ratio", "predicted": ratio}
    for name, one in found.items():
        figures = {
            "output_tokens_per_s": one.tokens_per_s,
            "step_ms": 1e3 * one.step_seconds,
            "step_GB": one.step_bytes / 1e9,
            "mean_sequences": one.sequences,
            "seconds": one.seconds,
        }
        for figure, value in figures.items():
            yield {**where, "side": name, "figure": figure, "predicted": value}


def main() -> None:
    """Print a line a profile; append to a CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=list(DEVICES), nargs="+", default=list(DEVICES))
    parser.add_argument("--csv", type=Path, help="append the predictions to this file")
    args = parser.parse_args()
    for device in map(DEVICES.__getitem__, args.device):
        print(f"{device.name}: h2o / stock; of each side ms a step, mean sequences, seconds")
        for profile in fitting(device):
            found = list(rows(device, profile))
            values = {(row["side"], row["figure"]): row["predicted"] for row in found}
            each = (
                " ".join(
                    f"{values[side.name, figure]:8.2f}"
                    for figure in ("step_ms", "mean_sequences", "seconds")
                )
                for side in profile.sides[:2]
            )
            print(f"  {profile.id:18} {values['', 'ratio']:5.2f}  {'   '.join(each)}", flush=True)
            if args.csv:
                text = [{**row, "predicted": f"{row['predicted']:.4g}"} for row in found]
                append_rows(args.csv, text)


if __name__ == "__main__":
    main()
