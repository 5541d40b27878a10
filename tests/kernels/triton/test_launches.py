# SPDX-License-Identifier: Apache-2.0
"""What a layer, and a prompt's end, launch on a GPU: each launch is the host's time, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from tests.kernels.caches import SHAPE, on_triton
from tests.kernels.harness import Layer
from tests.kernels.life import Life
from vllm_h2o.policy import Budget
from vllm_h2o.worker.after_step import AfterStep
from vllm_h2o.worker.attention import HeavyHitterImpl

STOCK = 2
"""Launches of a layer in stock vLLM: K and V are written, and attended to."""
FREE = {
    "alias", "as_strided", "detach", "empty", "expand", "lift_fresh", "new_empty", "permute",
    "select", "slice", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip
"""Operations of torch that launch nothing: they allocate, or view."""


class Launches(TorchDispatchMode):
    """Counts what runs on a device: kernels, which are left out here, and operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run, and count."""
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """What is launched in here, by name."""
    with pytest.MonkeyPatch.context() as patch, Launches() as counted:

        def run(kernel: InterpretedFunction, *args: Any, **options: Any) -> None:
            counted.found[kernel.__name__] += 1

        patch.setattr(InterpretedFunction, "run", run)
        yield counted.found


def counts(monkeypatch: pytest.MonkeyPatch, policy: str) -> tuple[list[Counter[str]], ...]:
    """Compute three prompts in a step, go on in another; count a layer's launches and what follows.

    The layer is not the step's first one: what all layers share is on the device.
    """
    forward, after = HeavyHitterImpl.forward, AfterStep.run
    layers, ends = list[Counter[str]](), list[Counter[str]]()

    def run_layer(impl: HeavyHitterImpl, *args: Any) -> torch.Tensor:
        forward(impl, *args)
        with launches() as found:
            output = forward(impl, *args)
        layers.append(found)
        return output

    def run_end(work: AfterStep) -> None:
        with launches() as found:
            after(work)
        ends.append(found)

    monkeypatch.setattr(HeavyHitterImpl, "forward", run_layer)
    monkeypatch.setattr(AfterStep, "run", run_end)
    layer = Layer(SHAPE, policy, 60, kernels=on_triton(SHAPE))
    budget = Budget(capacity=32, num_heavy=15, num_recent=16, num_sinks=0)
    lives = {name: Life(name, budget, [40 + 20 * i], 2) for i, name in enumerate("abc")}
    for life in lives.values():
        life.prepare(SHAPE, layer.builder.ranking.lifetime)
    for _ in range(2):
        layer.step({name: life.next_plan() for name, life in lives.items()}, lives)
    return layers, ends


@pytest.mark.parametrize(("policy", "more"), [("h2o", (1, 0)), ("h2o2", (4, 2))])
def test_a_layer_launches_little_more_than_stock(
    monkeypatch: pytest.MonkeyPatch, policy: str, more: tuple[int, int]
) -> None:
    """Prompts, then decodes, however many requests there are; packing, for all prompts at once."""
    layers, ends = counts(monkeypatch, policy)
    assert [found.total() - STOCK for found in layers] == list(more), layers
    assert 0 < ends[0].total() <= 9, ends[0]
    assert not ends[1], ends[1]
