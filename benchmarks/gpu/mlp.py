# SPDX-License-Identifier: Apache-2.0
"""The MLP of a ReLU model by neurons on a device: predicted, checked, and timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from benchmarks.gpu.devices import COPY, LAUNCH, LOAD, Device, Kernel
from benchmarks.gpu.engines import Check
from vllm_h2o.kernels import coarse
from vllm_h2o.kernels.coarse import GROUP, Coarse
from vllm_h2o.kernels.torch.neurons import TorchNeurons
from vllm_h2o.kernels.triton.neurons import ESTIMATED, LISTED, TritonNeurons, constants

TOKENS = (1, 8)
"""Sequences of a step: one, and as many as are skipped for by default."""
MODES = ("dense", "exact", "predicted")
USED = 0.1
"""Share of the neurons that a token uses; tokens use them independently of each other."""
SPARE = 0.02
"""Share of the rows of the first matrix that a prediction keeps beside those that are used."""
GROUP_STEP = 0.25e-6
"""Seconds in which a program of ``estimate`` multiplies a group of columns, loaded ahead."""


class Layer(NamedTuple):
    """The MLP of one layer; its weights are of 16 bits."""

    name: str
    neurons: int
    width: int


OPT, SMALL = Layer("OPT-6.7B", 16384, 4096), Layer("a small one", 1100, 200)
KERNELS: Mapping[str, Kernel] = {
    "list_used": Kernel(40, 4096),
    "add_rows": Kernel(64, 9344),
    "add_up": Kernel(32, 2048),
    "estimate": Kernel(71, 9216),
    "multiply": Kernel(40, 16384),
}
"""For 8 tokens of bfloat16, and 9.0, as :mod:`benchmarks.gpu.compiled` finds them."""


class Launch(NamedTuple):
    """One launch: its programs, the bytes of all, and the seconds of the longest."""

    kernel: str
    programs: int
    bytes: float
    longest: float


def down_launches(layer: Layer, tokens: int) -> list[Launch]:
    """Launches of the second matrix."""
    own = constants(tokens, torch.bfloat16)
    used = layer.neurons * union(tokens)
    lists, tiles = layer.neurons // LISTED, math.ceil(layer.width / own["add_rows"]["TILE"])
    partial = 4 * lists * tokens * layer.width
    loads = math.ceil(used / lists / own["add_rows"]["ROWS"])
    adds = math.ceil(lists / own["add_up"]["ADDED"])
    return [
        Launch("list_used", lists, 2 * tokens * layer.neurons + 4 * used, 3 * LOAD),
        Launch("add_rows", tiles * lists, 2 * used * layer.width + partial, (3 + loads) * LOAD),
        Launch("add_up", tiles * tokens, partial, (2 + adds) * LOAD),
    ]


def up_launches(layer: Layer, tokens: int) -> list[Launch]:
    """Launches of the first matrix, with its 4-bit copy."""
    own = constants(tokens, torch.bfloat16)["multiply"]
    kept = layer.neurons * min(1.0, union(tokens) + SPARE)
    lists, weights = layer.neurons // ESTIMATED, layer.neurons * layer.width
    groups = layer.width // GROUP
    programs = lists * math.ceil(kept / lists / own["ROWS"])
    loads = math.ceil(layer.width / own["TILE"])
    return [
        Launch("estimate", lists, weights * (0.5 + 2 / GROUP), 3 * LOAD + groups * GROUP_STEP),
        Launch("multiply", programs, 2 * kept * layer.width, (4 + loads / 2) * LOAD),
    ]


def union(tokens: int) -> float:
    """Return the share of the neurons that any of so many tokens uses."""
    return 1.0 - (1 - USED) ** tokens


def predicted(device: Device, layer: Layer, tokens: int) -> dict[str, float]:
    """Milliseconds, megabytes and launches of both matrices, by mode."""
    dense = 2.0 * layer.neurons * layer.width
    both = down_launches(layer, tokens), up_launches(layer, tokens)
    seconds, moved = zip(*(_of(device, launches) for launches in both), strict=True)
    whole = dense / (COPY * device.bytes_per_s) + LAUNCH
    found = {
        "dense": (2 * whole, 2 * dense, 2),
        "exact": (whole + seconds[0], dense + moved[0], 1 + len(both[0])),
        "predicted": (sum(seconds), sum(moved), len(both[0]) + len(both[1])),
    }
    figures = dict[str, float]()
    for mode, (took, read, launches) in found.items():
        figures |= {f"mlp_{mode}_ms": 1e3 * took, f"mlp_{mode}_MB": read / 1e6}
        figures[f"mlp_{mode}_launches"] = launches
    return figures


def _of(device: Device, launches: list[Launch]) -> tuple[float, float]:
    """Seconds and bytes of launches one after the other."""
    took = (device.seconds(KERNELS[name], *rest) for name, *rest in launches)
    return sum(took), sum(launch.bytes for launch in launches)


class Weights(NamedTuple):
    """A random layer of which a token uses a tenth, on a device."""

    up: torch.Tensor
    down: torch.Tensor
    bias: torch.Tensor
    copy: Coarse

    @classmethod
    def of(cls, layer: Layer, dtype: torch.dtype, device: torch.device) -> Weights:
        """Draw it."""
        shape = layer.neurons, layer.width
        up, down = (0.02 * torch.randn(shape, device=device) for _ in range(2))
        below = -1.2816 * 0.02 * layer.width**0.5  # a tenth of normal numbers is above
        bias = torch.full((layer.neurons,), below, device=device).to(dtype)
        up = up.to(dtype)
        return cls(up, down.to(dtype), bias, coarse.coarsen(up, bias, 0.99))


Computed = Callable[[torch.Tensor], torch.Tensor]


def modes(weights: Weights, counts: torch.Tensor) -> dict[str, Computed]:
    """The MLP in each mode: tokens [tokens, width] -> [tokens, width]."""
    kernels, second = TritonNeurons(), weights.down.t().contiguous()

    def used(x: torch.Tensor) -> torch.Tensor:
        return kernels.down(x.relu(), weights.down, None, counts)

    def dense(x: torch.Tensor) -> torch.Tensor:
        return linear(x, weights.up, weights.bias)

    return {
        "dense": lambda x: linear(dense(x).relu(), second),
        "exact": lambda x: used(dense(x)),
        "predicted": lambda x: used(kernels.up(x, weights.up, weights.bias, weights.copy, counts)),
    }


def check(layer: Layer, dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    """Compare with the torch kernels on the device; a captured graph with what it captured."""
    weights, kernels, theirs = Weights.of(layer, dtype, device), TritonNeurons(), TorchNeurons()
    allowed = 1e-5 if dtype == torch.float32 else 1e-2
    for tokens in TOKENS:
        counts, other = (torch.zeros(2, dtype=torch.int64, device=device) for _ in range(2))
        x = torch.randn(tokens, layer.width, device=device).to(dtype)
        y = kernels.up(x, weights.up, weights.bias, weights.copy, counts)
        wanted = theirs.up(x, weights.up, weights.bias, weights.copy, other)
        kept, expected = y != 0, wanted != 0
        # An estimate at the cut may be on either side.
        yield f"mlp of {tokens}: rows kept that differ", _mean(kept != expected), 1e-3
        far = (y - wanted).float().where(kept & expected, 0).abs().max() / wanted.abs().max()
        yield f"mlp of {tokens}: products, relative", float(far), allowed
        ours = kernels.down(y.relu(), weights.down, None, counts)
        wanted = theirs.down(y.relu(), weights.down, None, other)
        far = (ours - wanted).float().abs().max() / wanted.float().abs().max()
        yield f"mlp of {tokens}: sums, relative", float(far), allowed
        read = (counts - other).abs().max() / layer.neurons
        yield f"mlp of {tokens}: rows read that differ", float(read), 1e-3
    if device.type == "cuda":
        yield "mlp: graph and eager differ", _graph(weights, x, counts), 0.0


def _mean(differ: torch.Tensor) -> float:
    return float(differ.float().mean())


def _graph(weights: Weights, x: torch.Tensor, counts: torch.Tensor) -> float:
    """Capture a step, run it over other tokens, and count what differs without a graph."""
    step, given = modes(weights, counts)["predicted"], x.clone()
    step(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(given)
    given.copy_(x.flip(0).roll(1, 1))
    graph.replay()
    return float((y != step(given)).sum())


def speed(
    layer: Layer,
    dtype: torch.dtype,
    device: torch.device,
    seconds: Callable[[Callable[[], object]], float],
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield tokens and milliseconds of each mode, as :func:`predicted` names them.

    Args:
        layer: its shape.
        dtype: of 16 bits.
        device: a GPU.
        seconds: times an action.

    """
    weights = Weights.of(layer, dtype, device)
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for tokens in TOKENS:
        x = torch.randn(tokens, layer.width, device=device).to(weights.up.dtype)
        found = {}
        for mode, step in modes(weights, counts).items():
            found[f"mlp_{mode}_ms"] = 1e3 * seconds(partial(step, x))
        yield tokens, found
