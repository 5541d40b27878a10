# SPDX-License-Identifier: Apache-2.0
"""The parts of the check, in their order, each with the seconds that it should take.

The order is what eight minutes should tell on a Hopper: kernels, kept sets, a graph, then the
factor of throughput, then all the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.gpu import kernels, latency, mlp, speed
from benchmarks.gpu.card import Card
from benchmarks.gpu.engines import COMBINED, COMPARED, Check, compare, control, retained
from benchmarks.gpu.expected import of_profile
from benchmarks.gpu.report import PROFILES, Report
from benchmarks.throughput.profiles import QUICK, Profile
from vllm_h2o.kernels.triton.kernels import PromptAttention

FIRST = "OPT-16-512+512"
"""The profile whose factor is measured in any case."""
MORE = ("8B-1/8", "free-100", "OPT-80-512+512", "OPT-30B-512+512", "8B-32k", "8B-1024")
"""Pools of cards of 24 to 141 GB, and one that is free."""
SERVED = {FIRST: 8.0, "8B-short": 32.0}
"""Requests per second that servers get while latencies are measured, by profile."""
ENGINE, SERVER = 45, 90
"""Seconds that an engine of a small model takes to start, and a server of a large one."""
Action = Callable[[Report, torch.device], Iterable[Check]]


@dataclass(frozen=True)
class Part:
    """A part of the checks, which runs in one process.

    Args:
        name: its kind, and what it is about.
        seconds: that it should take, with its process's start; coarse.
        action: its checks.
        gigabytes: of the smallest card that it is for.

    """

    name: str
    seconds: float
    action: Action
    gigabytes: int = 0

    @property
    def kind(self) -> str:
        """Its kind; ``--parts`` chooses by it."""
        return self.name.split(":")[0]

    @property
    def limit(self) -> float:
        """Seconds after which it hangs."""
        return 3 * self.seconds + 60


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


def parts(small: bool, every: bool, card: Card) -> list[Part]:
    """All parts, the most telling first.

    Args:
        small: for a CPU, where kernels are interpreted; graphs and speed need a device.
        every: engines, sizes and profiles that take long, too.
        card: the device; one without bfloat16 gets float16 in its place.

    """
    if small:
        llama = _engines("llama", list(COMPARED), small)
        found = [*map(_kernels, kernels.SMALL), _mlp(mlp.SMALL, torch.float32)]
        found += [_retained("float32", small), _throughput(QUICK[0], card, small), *llama]
        return [*found, _latency(latency.SMALL, 8.0, card, small)]
    odd, real, timed = (_typed(sizes, card) for sizes in (kernels.ODD, kernels.REAL, speed.SIZES))
    half = str(card.half).removeprefix("torch.")
    first, *more = (PROFILES[name] for name in (FIRST, *MORE))
    found = [_kernels(odd[0]), _retained("float32", small), _graph(real[0])]
    found += [_throughput(first, card, small), _kernels(odd[1]), _retained(half, small)]
    found += [_graph(real[1]), *(_speed(size) for size in timed)]
    names = list(COMPARED)
    found += _engines("llama", names if every else names[:4], small)
    found += [_latency(PROFILES[name], rate, card, small) for name, rate in SERVED.items()]
    found += [_kernels(size) for size in (*odd[2:], *real)]
    found += [_graph(size) for size in real[2:]]
    (long,) = _typed((kernels.LONG,), card)
    found.append(Part("kernels: 128k tokens", 60, lambda _, at: kernels.check_long(long, at)))
    found += [_mlp(mlp.OPT, dtype) for dtype in (card.half, torch.float32)]
    found.append(Part("speed: MLP", 40, lambda report, at: report.mlp(mlp.OPT, at)))
    if every:
        # OPT has no rotary embeddings, which h2o2's rotated queries need.
        plain = [name for name, (one, _) in COMPARED.items() if one != COMBINED]
        found += [_throughput(profile, card, small) for profile in more]
        found += _engines("opt", plain, small)
    return [replace(part, seconds=part.seconds * card.pace) for part in found]


def _typed(sizes: Sequence[kernels.Size], card: Card) -> list[kernels.Size]:
    """The sizes in the card's 16-bit type where they have bfloat16, each once."""
    halves = {torch.bfloat16: card.half}
    typed = (replace(size, dtype=halves.get(size.dtype, size.dtype)) for size in sizes)
    return list(dict.fromkeys(typed))


def _kernels(size: kernels.Size) -> Part:
    return Part(f"kernels: {size}", 60, lambda _, device: check_kernels(device, size))


def _mlp(layer: mlp.Layer, dtype: torch.dtype) -> Part:
    name = f"kernels: MLP of {layer.name}, {dtype}"
    return Part(name, 30, lambda _, device: mlp.check(layer, dtype, device))


def _graph(size: kernels.Size) -> Part:
    return Part(f"graphs: {size}", 30, lambda _, device: kernels.check_graph(size, device))


def _speed(size: kernels.Size) -> Part:
    def action(report: Report, device: torch.device) -> Iterator[Check]:
        return report.speed(size, device, flash(device, size))

    return Part(f"speed: {size}", 40, action)


def _throughput(profile: Profile, card: Card, small: bool) -> Part:
    """A part of one pair, whose engines run as long as is predicted where the card is known."""
    seconds = len(profile.sides) * SERVER + _running(profile, card)
    action: Action = lambda report, _: report.throughput(profile, small)  # noqa: E731
    return Part(f"throughput: {profile.id}", seconds, action, profile.card)


def _latency(profile: Profile, rate: float, card: Card, small: bool) -> Part:
    seconds = len(profile.sides) * (SERVER + profile.num_prompts / rate) + _running(profile, card)
    action: Action = lambda report, _: report.latency(profile, rate, small)  # noqa: E731
    return Part(f"latency: {profile.id}", seconds, action, profile.card)


def _running(profile: Profile, card: Card) -> float:
    """Predicted seconds of all requests on both sides; a Hopper's where the card is not known."""
    known = of_profile(card, profile)
    found = known or of_profile(replace(card, name="H100"), profile)
    seconds = math.fsum(value for (_, figure), value in found.items() if figure == "seconds")
    return seconds / card.pace if known else seconds  # all parts are multiplied by the pace


def _retained(dtype: str, small: bool) -> Part:
    def action(report: Report, _: torch.device) -> Iterator[Check]:
        return retained(report.out, small, dtype)

    return Part(f"engines: retained sets, {dtype}", ENGINE + 30, action)


def _engines(shape: str, names: Sequence[str], small: bool) -> list[Part]:
    """Pairs of engines, and the control."""
    actions = {name: partial(compare, small=small, shape=shape, name=name) for name in names}
    actions["control"] = partial(control, small=small, shape=shape)

    def part(name: str, action: Callable[..., Iterator[Check]]) -> Part:
        return Part(f"engines: {shape}, {name}", 2 * ENGINE, lambda report, _: action(report.out))

    return [part(*each) for each in actions.items()]
