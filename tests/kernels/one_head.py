# SPDX-License-Identifier: Apache-2.0
"""One KV head's inputs, a reference that runs on them, and torch's own attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_h2o.kernels.reference import Head
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.policy import Budget, Ranking, Term

HEAD_SIZE = 8
SCALE = 0.7


@dataclass
class Inputs:
    """q [n, G, D], k [n, D], v [n, D] of one KV head's request, float64."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def draw(cls, num_tokens: int, group: int = 1, seed: int = 0) -> Inputs:
        """Normally distributed, the queries three times as wide."""
        torch.manual_seed(seed)
        shapes = ((num_tokens, group, HEAD_SIZE), (num_tokens, HEAD_SIZE), (num_tokens, HEAD_SIZE))
        query, key, value = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
        return cls(3 * query, key, value)

    def attend(self, visible: torch.Tensor) -> torch.Tensor:
        """torch's own attention under a mask [n, n] of (query, key); [n, G, D]."""
        query = self.query.transpose(0, 1)[None]
        key, value = (
            t[None, None].expand(1, query.shape[1], -1, -1) for t in (self.key, self.value)
        )
        out = scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=SCALE)
        return out[0].transpose(0, 1)

    def probabilities(self, visible: torch.Tensor) -> torch.Tensor:
        """[n, G, n], one exponential after another."""
        weight = torch.einsum("igd,jd->igj", self.query, self.key).mul(SCALE).exp()
        weight = weight * visible[:, None, :]
        return weight / weight.sum(-1, keepdim=True)


def run(head: Head, inputs: Inputs, chunks: Sequence[int]) -> tuple[torch.Tensor, list[set[int]]]:
    """Prompt in chunks, then a token a step; outputs [n, G, D], and positions after each step."""
    start, outputs, held = 0, [], []
    num_tokens = inputs.key.shape[0]
    steps = [*chunks, *[1] * (num_tokens - sum(chunks))]
    for i, length in enumerate(steps):
        part = slice(start, start + length)
        ends = i == len(chunks) - 1
        outputs.append(head.step(inputs.query[part], inputs.key[part], inputs.value[part], ends))
        start += length
        held.append(set(head.strip.position.tolist()))
    return torch.cat(outputs), held


def head(capacity: int, num_recent: int, num_sinks: int = 0, power: int = 1) -> Head:
    """An empty float64 head that ranks by the sum of probabilities; by position with power 0."""
    budget = Budget(capacity, capacity - 1 - num_recent - num_sinks, num_recent, num_sinks)
    ranking = Ranking(Term("all", "sum", power)) if power else Ranking()
    return Head(Strip.empty(HEAD_SIZE, torch.float64), budget, ranking, scale=SCALE)


def causal(num_tokens: int) -> torch.Tensor:
    """[n, n]: key j is visible to query i when j <= i."""
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of float64 sums."""
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def strip(scores: Sequence[float], positions: Sequence[int] | None = None) -> Strip:
    """A strip with these scores; keys say which token they are of."""
    position = torch.tensor(positions if positions is not None else range(len(scores)))
    key = position[:, None].double().expand(-1, HEAD_SIZE).clone()
    return Strip(key, -key, torch.tensor(scores, dtype=torch.float64), position)


def budget(capacity: int, num_recent: int, num_sinks: int) -> Budget:
    """Slots of a head that evicts a token with each new one."""
    return Budget(capacity, capacity - 1 - num_recent - num_sinks, num_recent, num_sinks)


def same(ours: Strip, theirs: Strip) -> None:
    """Equal in all that a slot holds."""
    for name in ("key", "value", "score", "position"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
