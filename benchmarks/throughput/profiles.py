"""What is run: a model, lengths, a pool, and two engines that differ by the policy alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.throughput.models import MODELS

MARGIN = 32
"""Tokens that a random prompt may come out longer than asked, having gone through text."""


@dataclass(frozen=True)
class Side:
    """One engine.

    Args:
        name: as tables show it.
        budget: of ``h2o``, as a share of ``max_model_len`` or in tokens; None for stock vLLM.
        pool_tokens: tokens that the pool holds, in pages of stock vLLM; None for what fits.
        max_num_seqs: sequences at once at most; None for vLLM's default.
        eviction: of ``h2o``: whether memory has to be short.

    """

    name: str
    budget: float | int | None = None
    pool_tokens: int | None = None
    max_num_seqs: int | None = None
    eviction: str = "always"

    def policy_options(self) -> dict[str, Any]:
        """Of an engine; none for stock vLLM."""
        if self.budget is None:
            return {}
        return {
            "--kv-policy": "h2o",
            "--kv-policy-config.budget": self.budget,
            "--kv-policy-config.eviction": self.eviction,
        }


@dataclass(frozen=True)
class Profile:
    """Sides of one workload.

    Args:
        id: short.
        what: one line.
        model: a name of ``models.MODELS``.
        input_len: tokens of each prompt.
        output_len: tokens generated for each.
        num_prompts: requests, all sent at once.
        sides: the one that is measured, and the one that it is divided by; others after these.
        figure: ``tokens`` per second, or ``step`` (time per output token, its inverse ratio).
        target: least ratio aimed at.
        block_size: tokens of a page.

    """

    id: str
    what: str
    model: str
    input_len: int
    output_len: int
    num_prompts: int
    sides: tuple[Side, ...]
    target: float
    figure: str = "tokens"
    block_size: int = 32
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def max_model_len(self) -> int:
        """Prompt and output, and what a prompt may be longer."""
        return self.input_len + self.output_len + MARGIN

    def num_blocks(self, side: Side, bytes_per_slot: int) -> int | None:
        """Pages, the null page included; in the same memory whichever the side.

        Args:
            side: h2o's pages are larger by a score and a position for each token.
            bytes_per_slot: of K and V of one token in one layer and KV head.

        """
        if side.pool_tokens is None:
            return None
        blocks = side.pool_tokens / self.block_size
        if side.budget is not None:
            blocks *= bytes_per_slot / (bytes_per_slot + 8)
        return math.floor(blocks) + 1

    def options(self, side: Side, bytes_per_slot: int) -> list[str]:
        """Of ``vllm bench throughput``."""
        options = {
            "--dataset-name": "random",
            "--random-input-len": self.input_len,
            "--random-output-len": self.output_len,
            "--num-prompts": self.num_prompts,
            "--max-model-len": self.max_model_len,
            "--block-size": self.block_size,
            "--num-gpu-blocks-override": self.num_blocks(side, bytes_per_slot),
            "--max-num-seqs": side.max_num_seqs,
            "--seed": 0,
            **self.extra,
        }
        options |= side.policy_options()
        flags = [str(part) for pair in options.items() if pair[1] is not None for part in pair]
        return [*flags, "--no-enable-prefix-caching"]


def tight(budget: float | int, pool: int, free_pool: int | None = None) -> tuple[Side, Side]:
    """h2o in a pool of so many tokens; stock vLLM in the same, or in a larger one."""
    stock = Side("stock vLLM", pool_tokens=free_pool or pool)
    return Side("h2o", budget, pool), stock


def free(budget: float | int, num_seqs: int, length: int) -> tuple[Side, Side]:
    """Both in a pool that holds so many sequences of that length whole, at once."""
    pool = num_seqs * (length + 2 * MARGIN) * 11 // 10
    return Side("h2o", budget, pool, num_seqs), Side("stock vLLM", None, pool, num_seqs)


CPU = (
    Profile(
        "P1", "tight pool: 4 sequences of full length", "smollm2", 512, 1024, 32,
        tight(0.2, 4 * 1568), 2.0,
    ),
    Profile(
        "P2", "the same work, stock vLLM in a free pool", "smollm2", 512, 1024, 32,
        (Side("h2o", 0.2, 4 * 1568), Side("stock vLLM", None, 32 * 1568, 18)), 1.0,
    ),
    Profile(
        "P3-4k", "batch of 8 at 4,096 tokens", "smollm2", 4096, 64, 8,
        free(0.2, 8, 4160), 1.6, "step",
    ),
    Profile(
        "P3-8k", "batch of 8 at 8,000 tokens", "smollm2", 8000, 64, 8,
        free(0.2, 8, 8064), 2.2, "step",
    ),
    Profile(
        "P4", "free pool, budget 100 %", "smollm2", 512, 512, 16,
        free(1.0, 16, 1024), 0.97,
    ),
    Profile(
        "P4-tracked", "free pool, all but a page", "smollm2", 512, 512, 16,
        free(992, 16, 1024), 0.97,
    ),
    Profile("P5", "prompts alone", "smollm2", 2048, 1, 8, free(0.2, 1, 2049), 0.85),
    Profile("P6-100", "one sequence, 100 %", "smollm2", 512, 512, 1, free(1.0, 1, 1024), 0.97),
    Profile("P6-20", "one sequence, 20 %", "smollm2", 512, 512, 1, free(0.2, 1, 1024), 0.97),
)  # fmt: skip
"""With SmolLM2-135M in bfloat16."""


def pressed(
    num_seqs: int,
    length: tuple[int, int],
    num_prompts: int,
    budget: float,
    model: str = "smollm2",
) -> Profile:
    """Pressure, stock vLLM and always in one memory: so many whole sequences with their scores."""
    whole = sum(length) + MARGIN
    slot = MODELS[model].bytes_per_slot
    pool = num_seqs * whole * (slot + 8) // slot
    sides = (
        Side("h2o, pressure", budget, pool, eviction="pressure"),
        Side("stock vLLM", None, pool),
        Side("h2o, always", budget, pool),
    )
    what = f"pool for {num_seqs} whole sequences"
    return Profile(f"P7-{num_seqs}", what, model, *length, num_prompts, sides, 1.0)


def under_pressure(length: tuple[int, int], model: str) -> tuple[Profile, ...]:
    """The requests of P1, or shorter ones, in four pools."""
    return tuple(pressed(num_seqs, length, 32, 0.2, model) for num_seqs in (4, 8, 16, 32))


PRESSURE = under_pressure((512, 1024), "smollm2")
"""P7."""
QUICK_PRESSURE = (pressed(2, (64, 64), 4, 64),)
"""For its functioning."""

_T4, _A100, _L4 = 2304, 112_000, 42_000
"""Tokens of KV cache beside the weights on cards of 16 and 80 GB (OPT-6.7B) and 24 GB (8B)."""
GPU = (
    *(
        Profile(
            f"OPT-{size}-{i}+{o}", f"OPT-6.7B's shape, the pool of a {size} GB card", "opt-6.7b",
            i, o, num, tight(0.2, pool), 3.1, block_size=16,
        )
        for size, pool, num in ((16, _T4, 64), (80, _A100, 512))
        for i, o in ((512, 512), (512, 1024), (1024, 992))
    ),
    Profile(
        "8B-1/64", "8B shape, the pool of a 24 GB card", "llama-8b", 6000, 500, 96,
        tight(102, _L4), 5.2, block_size=16,
    ),
    Profile(
        "8B-1/8", "8B shape, the pool of a 24 GB card", "llama-8b", 6000, 500, 96,
        tight(816, _L4), 2.5, block_size=16,
    ),
    Profile(
        "tight-200", "200 requests in a tight pool", "llama-8b", 128, 1024, 200,
        tight(0.2, 50_000), 1.8, block_size=16,
    ),
    Profile(
        "batch-32", "batch of 32 at 8k, budget 2048", "llama-8b", 8000, 128, 32,
        free(2048, 32, 8128), 1.6, "step", block_size=16,
    ),
    Profile(
        "free-100", "free pool, budget 100 %", "llama-8b", 1024, 512, 128,
        free(1.0, 128, 1536), 0.97, block_size=16,
    ),
    Profile(
        "free-tracked", "free pool, all but a page", "llama-8b", 1024, 512, 128,
        free(1520, 128, 1536), 0.97, block_size=16,
    ),
)  # fmt: skip
"""Shapes of real models with weights of chance: for speed alone, never for quality."""

QUICK = (Profile("quick", "a few steps of everything", "smollm2", 64, 48, 6, tight(64, 320), 0.0),)
"""For its functioning."""
