# SPDX-License-Identifier: Apache-2.0
"""Steps made of random tensors for the native kernels, and their results in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tests.kernels.harness import Shape, empty_cache, views
from vllm_h2o.kernels.batch import DECODE_FIELDS, DecodeBatch, PromptChunk, StepTensors
from vllm_h2o.kernels.cache import LayerCache


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Set the number of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


@dataclass
class Pool:
    """Pages that are NaN but for the first slots of some requests.

    Args:
        shape: sizes.
        lengths: slots of each request that hold tokens.
        extra: pages of each table after those that the slots need; another's.

    """

    shape: Shape
    lengths: list[int]
    extra: int = 1

    def __post_init__(self) -> None:
        needs = [max(-(-length // self.shape.block_size), 1) for length in self.lengths]
        order = (torch.randperm(sum(needs)) + 1).split(needs)
        width = max(needs) + self.extra
        self.block_table = torch.stack(
            [torch.cat([own, order[i - 1].repeat(width)])[:width] for i, own in enumerate(order)]
        ).to(torch.int32)
        self.kv_cache = empty_cache(self.shape, sum(needs) + 1)
        self.cache = views(self.kv_cache, self.shape)
        for request, length in enumerate(self.lengths):
            for head in range(self.shape.num_kv_heads):
                self.fill(request, head, length)

    def fill(self, request: int, head: int, length: int) -> None:
        """Random K, V and scores for a strip's slots; positions are those of a prompt."""
        at = self.at(request, head, length)
        size = (length, self.shape.head_size)
        self.cache.key[at] = torch.randn(size).to(self.shape.dtype)
        self.cache.value[at] = torch.randn(size).to(self.shape.dtype)
        self.cache.score[at] = torch.rand(length)
        self.cache.position[at] = torch.arange(length, dtype=torch.int32)

    def at(self, request: int, head: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, offsets) of the first slots."""
        slot = torch.arange(length)
        block = self.block_table[request][slot // self.shape.block_size].long()
        return block * self.shape.num_kv_heads + head, slot % self.shape.block_size

    def before(self) -> LayerCache:
        """A copy of the pages as they are."""
        return views(self.kv_cache.clone(), self.shape)

    def tensors(self, number: int) -> StepTensors:
        """Tensors of a step's tokens: q, k and v are views of one tensor; outputs are NaN."""
        heads = self.shape.num_kv_heads
        whole = torch.randn(number, heads * (self.shape.group + 2), self.shape.head_size)
        query, key, value = whole.to(self.shape.dtype).split(
            [heads * self.shape.group, heads, heads], 1
        )
        out = torch.full(query.shape, torch.nan, dtype=self.shape.dtype)
        return StepTensors(query * 2, key, value, out, self.shape.scale)


def decode_batch(block_table: torch.Tensor, **fields: list[int]) -> DecodeBatch:
    """A batch of these fields; others are zeros."""
    rows = [fields.get(name, [0] * block_table.shape[0]) for name in DECODE_FIELDS]
    return DecodeBatch(block_table, torch.tensor(rows))


def prompt_chunk(
    block_table: torch.Tensor, tokens: slice, resident_start: int, **rest: int
) -> PromptChunk:
    """A chunk of which all tokens survive, at positions that are its slots, unless told."""
    where = {"resident_start": resident_start, "logical_start": resident_start}
    return PromptChunk(tokens=tokens, block_table=block_table, **(where | rest))


@dataclass(frozen=True)
class Strip64:
    """What one KV head holds of one request, in float64: [L, D], [L, D], [L], [L]."""

    key: torch.Tensor
    value: torch.Tensor
    score: torch.Tensor
    position: torch.Tensor

    @classmethod
    def of(cls, pool: Pool, request: int, head: int, length: int) -> Strip64:
        """A copy."""
        at, cache = pool.at(request, head, length), pool.cache
        views = (cache.key, cache.value, cache.score)
        return cls(*(view[at].double() for view in views), cache.position[at].long())


def attend64(
    strip: Strip64,
    query: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and probabilities.

    Args:
        strip: L slots.
        query: [T, G, D].
        seen: [T, L], bool: which slots each query attends to.
        scale: of the logits.

    Returns:
        [T, G, D] and [T, G, L].

    """
    logits = torch.einsum("tgd,ld->tgl", query.double(), strip.key.nan_to_num()) * scale
    probs = torch.softmax(logits.masked_fill(~seen[:, None], -torch.inf), dim=-1)
    return torch.einsum("tgl,ld->tgd", probs, strip.value.nan_to_num()), probs


def sums64(probs: torch.Tensor, power: int) -> torch.Tensor:
    """[L]: the probabilities' powers, summed over queries and the group; power 0 adds nothing."""
    return probs.pow(power).sum(dim=(0, 1)) if power else torch.zeros(probs.shape[-1]).double()
