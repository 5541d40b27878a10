# SPDX-License-Identifier: Apache-2.0
"""Text that a model writes by itself, and how much of it repeats what it has written before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from benchmarks.quality.tasks import Output, prose

GRAM = 4


def first_4_grams(tokens: Sequence[int]) -> list[bool]:
    """Whether each token ends a 4-gram that has not occurred before; False without a 4-gram."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for end in range(1, len(tokens) + 1):
        gram = tuple(tokens[end - GRAM : end]) if end >= GRAM else ()
        found.append(bool(gram) and gram not in seen)
        seen.add(gram)
    return found


def distinct_4_grams(tokens: Sequence[int]) -> float:
    """Different 4-grams over all 4-grams."""
    return sum(first_4_grams(tokens)) / (len(tokens) - GRAM + 1)


@dataclass(frozen=True)
class Writing(Output):
    """Texts that are continued freely, past any end; ``tail`` says for how many tokens.

    Args:
        temperature: of sampling, with the text's number as the seed; 0: greedy.

    """

    temperature: float

    @property
    def costs(self) -> bool:
        """False: more is better."""
        return False

    def figures(self, nats: torch.Tensor, first: torch.Tensor, slots: int) -> list[float]:
        """One for each text: different 4-grams over all of its output.

        Args:
            nats: not used.
            first: [W, S], whether each token ends a 4-gram that is new in the output.
            slots: not used.

        """
        return list(first[:, GRAM - 1 :].to(torch.float64).mean(1).tolist())


def writing(
    tokenizer: Tokenizer,
    names: Sequence[str],
    count: int,
    prompt: int,
    output: int,
    temperature: float,
) -> Writing:
    """Begin texts with real prose.

    Args:
        tokenizer: of the model.
        names: of the texts that the prompts are from.
        count: prompts from each.
        prompt: tokens of each.
        output: tokens to be written.
        temperature: see :class:`Writing`.

    """
    begun = prose(tokenizer, names, count, prompt + output, output)
    name = f"written at {temperature}" if temperature else "written greedily"
    return Writing(name, begun.context, begun.tail, begun.answers, temperature)
