# SPDX-License-Identifier: Apache-2.0
"""Profiles: a model, lengths, a pool, and two engines that differ by the policy alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.throughput.models import MODELS

MARGIN = 32
"""Tokens that a random prompt may come out longer than asked, having gone through text."""


@dataclass(frozen=True)
class Side:
    """One engine.

    Args:
        name: as tables show it.
        budget: as a share of ``max_model_len`` or in tokens; None for stock vLLM.
        pool_tokens: tokens that the pool holds, in pages of stock vLLM; None for what fits.
        max_num_seqs: sequences at once at most; None for vLLM's default.
        policy: with a budget.
        options: of the policy's, further ones.

    """

    name: str
    budget: float | int | None = None
    pool_tokens: int | None = None
    max_num_seqs: int | None = None
    policy: str = "h2o"
    options: Mapping[str, Any] = field(default_factory=dict)

    def policy_options(self) -> dict[str, Any]:
        """Return the policy's options for an engine; none for stock vLLM."""
        if self.budget is None:
            return {}
        options = {"budget": self.budget, **self.options}
        flags = {f"--kv-policy-config.{name}": value for name, value in options.items()}
        return {"--kv-policy": self.policy, **flags}


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
        block_size: tokens of a page.
        extra: further options of every engine.
        card: GB of the smallest card that the model and the pool are for; 0: any.

    """

    id: str
    what: str
    model: str
    input_len: int
    output_len: int
    num_prompts: int
    sides: tuple[Side, ...]
    figure: str = "tokens"
    block_size: int = 32
    extra: Mapping[str, Any] = field(default_factory=dict)
    card: int = 0

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
        """Return the options of ``vllm bench throughput``."""
        return [*self.requests(), *self.engine(side, bytes_per_slot)]

    def requests(self) -> list[str]:
        """Options that say what is asked for."""
        return flags(
            {
                "--dataset-name": "random",
                "--random-input-len": self.input_len,
                "--random-output-len": self.output_len,
                "--num-prompts": self.num_prompts,
                "--seed": 0,
            }
        )

    def engine(self, side: Side, bytes_per_slot: int) -> list[str]:
        """Options of an engine."""
        options = {
            "--max-model-len": self.max_model_len,
            "--block-size": self.block_size,
            "--num-gpu-blocks-override": self.num_blocks(side, bytes_per_slot),
            "--max-num-seqs": side.max_num_seqs,
            **self.extra,
            **side.policy_options(),
        }
        return [*flags(options), "--no-enable-prefix-caching"]


def flags(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line, without those that are None."""
    return [str(part) for pair in options.items() if pair[1] is not None for part in pair]


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
        "P1", "32 requests of 512 + 1,024 tokens, memory for 4", "smollm2", 512, 1024, 32,
        tight(0.2, 4 * 1568),
    ),
    Profile(
        "P2", "the same, stock vLLM with memory for all", "smollm2", 512, 1024, 32,
        (Side("h2o", 0.2, 4 * 1568), Side("stock vLLM", None, 32 * 1568, 18)),
    ),
    Profile(
        "P3-4k", "one step of 8 requests of 4,096 tokens", "smollm2", 4096, 64, 8,
        free(0.2, 8, 4160), "step",
    ),
    Profile(
        "P3-8k", "one step of 8 requests of 8,000 tokens", "smollm2", 8000, 64, 8,
        free(0.2, 8, 8064), "step",
    ),
    Profile(
        "P4", "16 requests, memory for all, nothing evicted", "smollm2", 512, 512, 16,
        free(1.0, 16, 1024),
    ),
    Profile(
        "P4-tracked", "the same, every token scored", "smollm2", 512, 512, 16,
        free(992, 16, 1024),
    ),
    Profile(
        "P6-100", "one request, nothing evicted", "smollm2", 512, 512, 1,
        free(1.0, 1, 1024),
    ),
    Profile("P6-20", "one request, budget 20 %", "smollm2", 512, 512, 1, free(0.2, 1, 1024)),
)  # fmt: skip
"""With SmolLM2-135M in bfloat16."""


def compared(
    id_: str, what: str, figure: str, budget: float, work: tuple[int, int, int]
) -> Profile:
    """h2o2 against h2o in a free pool, without merging, reading twice, and stock vLLM: all in turn.

    Args:
        id_: of the profile.
        what: one line.
        figure: of the profile.
        budget: of the policies.
        work: tokens of each prompt, generated for each, and requests.

    """
    ours, stock = free(budget, work[2], work[0] + work[1])
    without = replace(ours, name="h2o2, merge=0", policy="h2o2", options={"merge": 0})
    again = {"score": "reconstruction"}
    reading = replace(ours, name="h2o2, reconstruction", policy="h2o2", options=again)
    sides = (replace(ours, name="h2o2", policy="h2o2"), ours, without, reading, stock)
    return Profile(id_, what, "smollm2-float32", *work, sides, figure)


POLICIES = (
    compared("H-decode", "decode, 16 sequences, budget 20 %", "step", 0.2, (512, 384, 16)),
    compared("H-one", "decode, one sequence, budget 20 %", "step", 0.2, (512, 384, 1)),
    compared("H-prompts", "prompts alone", "tokens", 0.2, (2048, 2, 4)),
)
"""With SmolLM2-135M in float32; every side of a round in turn."""


def pressed(
    num_seqs: int,
    length: tuple[int, int],
    num_prompts: int,
    budget: float,
    model: str = "smollm2",
) -> Profile:
    """Pressure, stock vLLM and prompt_end in the memory of ``num_seqs`` whole sequences."""
    whole = sum(length) + MARGIN
    slot = MODELS[model].bytes_per_slot
    pool = num_seqs * whole * (slot + 8) // slot
    sides = (
        Side("h2o, pressure", budget, pool, options={"eviction": "pressure"}),
        Side("stock vLLM", None, pool),
        Side("h2o, prompt_end", budget, pool),
    )
    what = f"pool for {num_seqs} whole sequences"
    return Profile(f"P7-{num_seqs}", what, model, *length, num_prompts, sides)


def under_pressure(length: tuple[int, int], model: str) -> tuple[Profile, ...]:
    """The requests of P1, or shorter ones, in four pools."""
    return tuple(pressed(num_seqs, length, 32, 0.2, model) for num_seqs in (4, 8, 16, 32))


PRESSURE = under_pressure((512, 1024), "smollm2")
"""P7."""
QUICK_PRESSURE = (pressed(2, (64, 64), 4, 64),)
"""For its functioning."""

_T4, _A100, _L4 = 2304, 112_000, 42_000
"""Tokens of KV cache beside the weights on cards of 16 and 80 GB (OPT-6.7B) and 24 GB (8B)."""
_OPT_30B, _8B_80, _8B_H200 = 8_800, 420_000, 545_000
"""The same on cards of 80 GB (OPT-30B, 8B), and 1,024 sequences of 512 slots on 141 GB (8B)."""
_8B: dict[str, Any] = {"model": "llama-8b", "block_size": 16}
_SHORT = tight(0.2, _L4)


def of_paper(model: str, name: str, card: int, pool: int, work: tuple[int, int, int]) -> Profile:
    """OPT's shape with a budget of 20 %, in a pool of ``pool`` tokens."""
    i, o, num = work
    what = f"{name}'s shape, {i:,} + {o:,} tokens, a card of {card} GB"
    id_ = f"{'OPT-30B' if model == 'opt-30b' else f'OPT-{card}'}-{i}+{o}"
    return Profile(id_, what, model, i, o, num, tight(0.2, pool), block_size=16, card=card)


GPU = (
    *(
        of_paper("opt-6.7b", "OPT-6.7B", card, pool, (i, o, num))
        for card, pool, num in ((16, _T4, 64), (80, _A100, 512))
        for i, o in ((512, 512), (512, 1024), (1024, 992))
    ),
    of_paper("opt-6.7b", "OPT-6.7B", 16, _T4, (512, 32, 64)),
    of_paper("opt-6.7b-long", "OPT-6.7B", 80, _A100, (2048, 2048, 256)),
    *(
        of_paper("opt-30b", "OPT-30B", 80, _OPT_30B, (i, o, num))
        for i, o, num in ((512, 32, 64), (512, 512, 64), (512, 1024, 64), (7000, 1024, 8))
    ),
    Profile(
        "8B-1/64", "8B shape, 6,000 + 500 tokens, budget 102, a card of 24 GB",
        input_len=6000, output_len=500, num_prompts=96, sides=tight(102, _L4), card=24, **_8B,
    ),
    Profile(
        "8B-1/8", "8B shape, 6,000 + 500 tokens, budget 816, a card of 24 GB",
        input_len=6000, output_len=500, num_prompts=96, sides=tight(816, _L4), card=24, **_8B,
    ),
    Profile(
        "8B-32k", "8B shape, 32,000 + 2,000 tokens, budget 4,096, a card of 80 GB",
        input_len=32000, output_len=2000, num_prompts=64, sides=tight(4096, _8B_80), card=80, **_8B,
    ),
    Profile(
        "8B-1024", "8B shape, 1,024 sequences of 512 slots, a card of 141 GB",
        input_len=1024, output_len=1024, num_prompts=1024, sides=tight(512, _8B_H200), card=141,
        **_8B,
    ),
    Profile(
        "8B-short", "8B shape, 128 + 128 tokens, a card of 24 GB",
        input_len=128, output_len=128, num_prompts=512, card=24,
        sides=(*_SHORT, replace(_SHORT[0], name="h2o2", policy="h2o2")), **_8B,
    ),
    Profile(
        "tight-200", "8B shape, 200 requests of 128 + 1,024 tokens, memory for 42",
        input_len=128, output_len=1024, num_prompts=200, sides=tight(0.2, 50_000), card=80, **_8B,
    ),
    Profile(
        "batch-32", "8B shape, one step of 32 requests of 8,000 tokens, budget 2,048",
        input_len=8000, output_len=128, num_prompts=32, sides=free(2048, 32, 8128), figure="step",
        card=80, **_8B,
    ),
    Profile(
        "free-100", "8B shape, 128 requests, memory for all, nothing evicted",
        input_len=1024, output_len=512, num_prompts=128, sides=free(1.0, 128, 1536), card=80, **_8B,
    ),
    Profile(
        "free-tracked", "the same, every token scored",
        input_len=1024, output_len=512, num_prompts=128, sides=free(1520, 128, 1536), card=80,
        **_8B,
    ),
)  # fmt: skip
"""Shapes of real models with random weights: for speed alone, never for quality."""

QUICK = (Profile("quick", "a few steps of everything", "smollm2", 64, 48, 6, tight(64, 320)),)
"""For its functioning."""
