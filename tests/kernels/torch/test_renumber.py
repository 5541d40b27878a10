"""Renumbering in pages against the reference's strip, and how far keys drift that stay for long."""

from __future__ import annotations

import pytest
import torch

from vllm_h2o.kernels.cache import LayerCache, cache_rows
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.kernels.torch.renumber import renumber

NUM_BLOCKS, HEADS, BLOCK, SIZE = 9, 2, 8, 16


def rotate_back(key: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """Angles of one theta for each pair, in the keys' dtype."""
    half = key.shape[-1] // 2
    frequency = 100.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = -distance[..., None] * frequency
    cos, sin = angle.cos().to(key.dtype), angle.sin().to(key.dtype)
    a, b = key[..., :half], key[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("num_slots", [BLOCK, 21, 24])
def test_pages_are_the_references_strip(num_slots: int, accumulates: bool) -> None:
    """Slots in any order of position, in any pages; nothing else of the cache is touched."""
    torch.manual_seed(num_slots)
    words = torch.randn(NUM_BLOCKS, HEADS, BLOCK, 2 * SIZE + 2)
    cache = LayerCache.of(words, SIZE)
    blocks = torch.randperm(NUM_BLOCKS)[:4].to(torch.int32)
    rows = cache_rows(blocks, HEADS)
    cache.position.fill_(-7)
    end = 90
    for head in range(HEADS):
        some = torch.randperm(end - 1)[: num_slots - 1]
        own = torch.cat([some, torch.tensor([end - 1])])[torch.randperm(num_slots)]
        flat = cache.position[rows[head]].flatten()
        flat[:num_slots] = own.to(torch.int32)
        cache.position[rows[head]] = flat.view(-1, BLOCK)
    before = [view.clone() for view in (cache.key, cache.value, cache.score, cache.position)]

    def held(views: list[torch.Tensor], head: int) -> list[torch.Tensor]:
        return [view[rows[head]].flatten(0, 1)[:num_slots] for view in views]

    strips = []
    for head in range(HEADS):
        key, value, score, position = held(before, head)
        strip = Strip(key.double(), value.double(), score.double(), position.long())
        assert strip.renumber(end, rotate_back, accumulates) == num_slots
        strips.append(strip)
    renumber(cache, blocks, num_slots, end, rotate_back, accumulates)
    after = [cache.key, cache.value, cache.score, cache.position]
    for head, strip in enumerate(strips):
        key, value, score, position = held(after, head)
        assert sorted(position.tolist()) == list(range(num_slots))
        assert position.tolist() == strip.position.tolist()
        torch.testing.assert_close(key.double(), strip.key, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(value.double(), strip.value, rtol=0, atol=0)
        torch.testing.assert_close(score.double(), strip.score, rtol=1e-5, atol=1e-6)
        if accumulates:  # what it got per query stays what it was
            old = held(before, head)
            mean, was = score / (num_slots - position), old[2] / (end - old[3])
            torch.testing.assert_close(mean, was, rtol=1e-5, atol=1e-6)
    mine = torch.zeros(cache.position.shape, dtype=torch.bool)
    slot = torch.arange(num_slots)
    mine[rows[:, slot // BLOCK], (slot % BLOCK).expand(HEADS, -1)] = True
    for view, old in zip(after, before, strict=True):
        assert torch.equal(view[~mine], old[~mine])
