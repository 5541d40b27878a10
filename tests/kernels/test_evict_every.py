# SPDX-License-Identifier: Apache-2.0
"""Several tokens evicted at a time: the definition, and every set of kernels that packs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.decodes import slow_on_triton
from tests.kernels.harness import Layer, Shape
from tests.kernels.lives import RANKINGS, make_lives, pool_size, with_windows
from tests.kernels.one_head import Inputs, causal, close, head, run
from tests.kernels.truth import Count, live
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.kernels.native import loader
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.kernels.triton.kernels import TritonKernels
from vllm_h2o.policy import Budget

KERNELS = ("torch", "triton", *loader.available())
ROWS: list[list[tuple[int, int, int, list[int], int]]] = [
    # (capacity, recent, sinks, chunks, decodes): with heavy hitters, and without
    [(16, 8, 0, [40], 40), (32, 12, 2, [7, 30, 1], 40), (16, 0, 0, [3], 50)],
    [(32, 27, 4, [34], 30), (16, 11, 4, [3], 40)],
]


def by_definition(
    inputs: Inputs, prompt: int, num_heavy: int, num_recent: int, num_sinks: int, evict_every: int
) -> tuple[torch.Tensor, list[set[int]], torch.Tensor]:
    """As a mask over positions: ``evict_every`` tokens later the lowest ones go again.

    Returns:
        Outputs; positions held after the prompt and each later token; scores of all positions.

    """
    num_tokens, kept = inputs.key.shape[0], num_sinks + num_heavy + num_recent
    visible = causal(num_tokens)
    score = inputs.probabilities(visible)[:prompt].sum(dim=(0, 1))

    def best(held: set[int], end: int) -> set[int]:
        safe = {j for j in held if j < num_sinks or j >= end - num_recent}
        ranked = sorted(held - safe, key=lambda j: (-float(score[j]), j))
        return safe | set(ranked[: kept - len(safe)])

    held = best(set(range(prompt)), prompt) if prompt > kept else set(range(prompt))
    seen = [held]
    for position in range(prompt, num_tokens):
        held = held | {position}
        visible[position] = False
        visible[position, list(held)] = True
        score = score + inputs.probabilities(visible)[position].sum(0)
        if len(held) == kept + evict_every:
            held = best(held, position + 1)
        seen.append(held)
    return inputs.attend(visible), seen, score


@pytest.mark.parametrize("evict_every", [2, 3, 7, 30])
@pytest.mark.parametrize("prompt", [1, 9, 10, 25])
@pytest.mark.parametrize(
    ("num_heavy", "num_recent", "num_sinks"), [(4, 5, 0), (9, 0, 0), (3, 4, 2), (0, 7, 2)]
)
def test_reference_equals_masked_attention(
    num_heavy: int, num_recent: int, num_sinks: int, prompt: int, evict_every: int
) -> None:
    """Outputs, what is held after every token, and scores: from a mask alone."""
    inputs = Inputs.draw(60, 2, seed=prompt)
    capacity = num_sinks + num_heavy + num_recent + evict_every
    one = head(capacity, num_recent, num_sinks)
    one.budget = Budget(capacity, num_heavy, num_recent, num_sinks, evict_every)
    outputs, held = run(one, inputs, [prompt])
    limits = (prompt, num_heavy, num_recent, num_sinks, evict_every)
    expected, seen, score = by_definition(inputs, *limits)
    assert held == seen
    close(outputs, expected)
    close(one.strip.score, score[one.strip.position])
    assert one.strip.position.tolist() == sorted(held[-1])  # in order: nothing is overwritten


def test_one_at_a_time_is_the_same_definition() -> None:
    """Packing after each token keeps what overwriting the victim keeps, a step earlier."""
    inputs, one = Inputs.draw(50, 2), head(10, 4)
    outputs, held = run(one, inputs, [20])
    expected, seen, _ = by_definition(inputs, 20, 5, 4, 0, 1)
    close(outputs, expected)
    for position, (before, after) in enumerate(zip(seen[:-1], held[1:], strict=True), start=20):
        assert after == before | {position}


def kernels_of(name: str, shape: Shape) -> Kernels:
    """The kernels of a device, or a variant of the C++ ones."""
    if name == "torch":
        return TorchKernels()
    if name == "triton":
        num_heads = shape.num_kv_heads * shape.group
        sizes = (shape.num_kv_heads, shape.head_size)
        return TritonKernels(torch.device("cpu"), 16, num_heads, *sizes)
    return loader.load(name)


@slow_on_triton({name: name for name in KERNELS}, "name")
@pytest.mark.parametrize(
    ("ranking", "evict_every"),
    [("sum", 2), ("mean of squares", 17), ("snapkv", 5), ("combined", 6), ("position", 9)],
)
def test_requests_step_by_step_equal_the_reference(
    ranking: str, evict_every: int, name: str
) -> None:
    """Retained tokens, scores, K, V, outputs and writes are the reference's after every step."""
    shape, count, (policy, options) = Shape(2, 2, 32, 16), Count(), RANKINGS[ranking]
    own = (*options, ("evict_every", evict_every))
    lives = with_windows(make_lives(ROWS[policy == "streaming"], evict_every))
    if name == "triton":  # interpreted
        lives = [replace(life, num_decodes=18) for life in lives]
    num_blocks = pool_size(lives, shape.block_size, share=0.8)
    kernels = kernels_of(name, shape)
    layer = Layer(shape, policy, num_blocks, kernels=kernels, options=own)
    live(layer, lives, count)
    count.check()
    assert count.num_selections > 2 * len(lives)
