# SPDX-License-Identifier: Apache-2.0
"""Random lives of requests, for layers with any kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import strategies as st

from tests.kernels.harness import Life, Shape
from vllm_h2o.kernels.torch.prefill import QUERY_TILE
from vllm_h2o.policy import Budget, Policy, Ranking, Term, policies

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALES = (0.25, 2.0)
"""Scales of K and V: powers of two, with which nothing but float8 rounds."""
Options = tuple[tuple[str, object], ...]

CUSTOM = Policy(
    name="custom",
    summary="terms that no policy of this package has",
    ranking=Ranking(Term("window", "sum", reach=3), Term("rotated", "sum", weight=0.5, block=40)),
)
BRIEF = Policy(
    name="brief",
    summary="a window that counts for a few tokens",
    ranking=Ranking(
        Term("all", "mean", power=2),
        Term("window", "max", power=2, weight=0.3, reach=5, skip=4, lifetime=6),
    ),
)
OTHERS = (CUSTOM, BRIEF)
"""Policies of these tests alone: conftest.py registers them."""
WINDOW = 6
RANKINGS: dict[str, tuple[str, Options]] = {
    "sum": ("h2o", ()),
    "sum of squares": ("h2o", (("score", "sum_squares"),)),
    "mean": ("h2o", (("score", "mean"),)),
    "mean of squares": ("h2o", (("score", "mean_squares"),)),
    "combined": ("h2o2", (("split", "none"), ("observation_window", WINDOW))),
    "snapkv": ("snapkv", (("observation_window", WINDOW),)),
    "custom": ("custom", (("observation_window", WINDOW),)),
    "lifetime": ("brief", (("observation_window", WINDOW),)),
    "position": ("streaming", ()),
}
"""Policy and options of a layer, by how it ranks."""
TABLE = {
    # name: (policy, shape, [(capacity, recent, sinks, chunks, decodes), ...])
    "the paper's halves": (
        "h2o",
        Shape(2, 1, 64, 16, FP32),
        [(16, 8, 0, [40], 40), (32, 16, 0, [7, 30, 1], 40), (48, 24, 0, [20], 60)],
    ),
    "no window, R = 0": (
        "h2o",
        Shape(2, 3, 80, 16, FP32),
        [(16, 0, 0, [30], 40), (32, 0, 2, [31], 30), (16, 0, 4, [3], 40)],
    ),
    "no heavy hitters, H = 0": (
        "h2o",
        Shape(1, 3, 64, 32, BF16),
        [(32, 31, 0, [32], 40), (32, 27, 4, [64, 1], 20)],
    ),
    "one heavy hitter": ("h2o", Shape(1, 1, 80, 16, FP16), [(16, 14, 0, [16], 40)]),
    "all sinks but one": ("h2o", Shape(2, 1, 64, 16, FP32), [(16, 0, 14, [40], 30)]),
    "groups of eight": (
        "h2o",
        Shape(4, 8, 64, 16, FP32),
        [(16, 7, 0, [5, 6, 7], 20), (32, 8, 1, [45], 20)],
    ),
    "three KV heads, bfloat16": (
        "h2o",
        Shape(3, 3, 80, 32, BF16),
        [(32, 16, 0, [50], 40), (64, 20, 4, [63], 10)],
    ),
    "float16": ("h2o", Shape(2, 8, 128, 16, FP16), [(32, 10, 0, [20, 20], 30)]),
    "more queries than a tile": (
        "h2o",
        Shape(2, 3, 64, 16, FP32),
        [(64, 32, 0, [QUERY_TILE * 2 + 9], 5), (64, 32, 0, [5, QUERY_TILE + 1], 5)],
    ),
    "the prompt's end around k": (
        "h2o",
        Shape(1, 1, 64, 16, FP32),
        [(32, 16, 0, [n], 6) for n in (1, 30, 31, 32, 33)],
    ),
    "local": ("local", Shape(2, 3, 64, 16, FP32), [(16, 15, 0, [9], 40), (32, 31, 0, [50], 20)]),
    "streaming": (
        "streaming",
        Shape(4, 1, 64, 32, FP16),
        [(32, 27, 4, [64], 40), (64, 59, 4, [3], 80)],
    ),
    "float8 of float32": (
        "h2o",
        Shape(2, 3, 64, 16, FP32, E4M3, SCALES),
        [(16, 8, 0, [40], 40), (32, 16, 2, [7, 30, 1], 40), (48, 24, 0, [20], 60)],
    ),
    "float8 of bfloat16": (
        "h2o",
        Shape(1, 4, 128, 32, BF16, E4M3),
        [(32, 16, 0, [50], 40), (64, 20, 4, [63], 10)],
    ),
    "the other float8 of float16": (
        "h2o",
        Shape(3, 1, 80, 16, FP16, E5M2, SCALES),
        [(32, 10, 0, [20, 20], 30)],
    ),
    "nothing is ever full": ("full", Shape(2, 1, 64, 16, FP32), [(1024, 1023, 0, [30, 3], 20)]),
}


LIVES = [
    (name, merge)
    for name, (policy, shape, _) in TABLE.items()
    for merge in (0.0, 0.15)
    if not merge or (policies()[policy].evicts and not shape.float8)
]
"""Each with victims dropped, and merged where they can be: random keys are not much alike."""
MERGES = st.sampled_from([0.0, 0.0, 0.15, 0.3])


def merging(threshold: float, shape: Shape | None = None) -> Options:
    """Options of a layer whose victims are merged; none where they are dropped, as of float8."""
    return () if not threshold or (shape and shape.float8) else (("merge", threshold),)


def make_lives(
    rows: list[tuple[int, int, int, list[int], int]], evict_every: int = 1
) -> list[Life]:
    """A request for each row of capacity, recent, sinks, chunks and decodes.

    With ``evict_every`` it takes ``evict_every - 1`` slots more.
    """
    budgets = [
        Budget(c + evict_every - 1, c - 1 - recent - sinks, recent, sinks, evict_every)
        for c, recent, sinks, *_ in rows
    ]
    return [
        Life(f"r{i}", budget, *rest, seed=i)
        for i, (budget, (_, _, _, *rest)) in enumerate(zip(budgets, rows, strict=True))
    ]


def page_budget(block_size: int, pages: int, recent: int, sinks: int, every: int = 1) -> Budget:
    """Slots of a request whose whole pages are evicted, ``every`` at a time.

    Args:
        block_size: slots of a page.
        pages: for heavy hitters; others have a sink or a recent token, or take the next tokens.
        recent: most recent positions.
        sinks: first positions.
        every: pages.

    """
    safe = -(-recent // block_size) - (-sinks // block_size)
    kept = (pages + safe) * block_size
    num_evicted = every * block_size
    heavy = kept - recent - sinks
    return Budget(kept + num_evicted, heavy, recent, sinks, num_evicted, block_size)


def whole_window(chunks: Sequence[int], window: int = WINDOW) -> list[int]:
    """Chunks of which the last one has the observation window, as the scheduler cuts them."""
    cut = list(chunks)
    while len(cut) > 1 and cut[-1] < window:
        last = cut.pop()
        cut[-1] += last
    return cut


def with_windows(lives: Sequence[Life]) -> list[Life]:
    """The same requests, none of which cuts its observation window."""
    return [replace(life, chunks=whole_window(life.chunks)) for life in lives]


def pool_size(lives: list[Life], block_size: int, share: float) -> int:
    """Pages, the null page included, for a share of what all need at most, and for any one."""
    needs = [-(-life.max_slots // block_size) for life in lives]
    return 1 + max(*needs, int(share * sum(needs)), 1)


@st.composite
def rows(draw: st.DrawFn, block_size: int, policy: str) -> tuple[int, int, int, list[int], int]:
    """Capacity, recent, sinks, chunks and decodes of a request."""
    capacity = block_size * draw(st.integers(1, 3))
    sinks = draw(st.sampled_from([0, 0, 1, 4]))
    rest = capacity - 1 - sinks
    recent = draw(st.integers(0, rest)) if policies()[policy].keeps_heavy else rest
    num_tokens = draw(
        st.integers(1, 2 * capacity) | st.sampled_from([capacity + i for i in (-2, -1, 0, 1)])
    )
    cuts = draw(st.sets(st.integers(1, num_tokens), max_size=4)) | {num_tokens}
    bounds = [0, *sorted(cuts)]
    chunks = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    return capacity, recent, sinks, chunks, draw(st.integers(0, 40))


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Shape, list[Life], float, int]:
    """Policy, shape, requests, share of the pages that all of them need, and a seed."""
    policy = draw(st.sampled_from(["h2o", "h2o", "h2o", "local", "streaming"]))
    shape = Shape(
        num_kv_heads=draw(st.integers(1, 4)),
        group=draw(st.sampled_from([1, 3, 8])),
        head_size=draw(st.sampled_from([32, 64, 80])),
        block_size=draw(st.sampled_from([16, 32])),
        dtype=draw(st.sampled_from([FP32, BF16, FP16])),
        float8=draw(st.sampled_from([None, None, None, E4M3, E5M2])),
    )
    lives = make_lives(draw(st.lists(rows(shape.block_size, policy), min_size=1, max_size=5)))
    if draw(st.booleans()):  # the recent window begins small
        first = draw(st.integers(0, 4))
        lives = [replace(o, budget=replace(o.budget, first_recent=first)) for o in lives]
    return policy, shape, lives, draw(st.sampled_from([0.3, 0.6, 1.0])), draw(st.integers(0, 999))
