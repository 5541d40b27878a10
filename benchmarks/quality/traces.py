# SPDX-License-Identifier: Apache-2.0
"""Traces of work, step by step, in which values written earlier are looked up.

Every token of a trace is known: it is forced, and judged at look-ups alone. A value is looked up
where it is written again behind its name:

- ``variables``: each variable is computed from an earlier one, whose value is written again;
- ``edits``: things are put on shelves of a number, and taken from them later.

The *distance* of a look-up is the number of tokens since the value was written. Each value is
looked up once, so no look-up refreshes another.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from tokenizers import Tokenizer

from benchmarks.quality.facts import encode
from benchmarks.quality.tasks import NOUNS, Output, Task

CONFIRMATION_SEED, DEVELOPMENT_SEED = 2, 1
NAMES = f"""
    {NOUNS}
    apple dragon ocean desert hammer basket candle ladder bottle pencil rabbit monkey turtle spider
    lemon pepper butter sugar planet valley tunnel palace temple prison museum hotel harbor village
    silver gold cotton paper glass stone rubber copper leather wood wool salt coffee rice corn wheat
    honey cheese bread milk fish meat oil coal sand clay brick wax ink soap rope cloth
""".split()
UNUSED = 14
"""Values that a look-up chooses from."""


@dataclass(frozen=True)
class Piece:
    """A piece of a trace.

    Args:
        text: of it, which begins a token.
        name: the name that this value belongs to; empty: it is no value.
        asked: whether the value was written before.

    """

    text: str
    name: str = ""
    asked: bool = False


def variables(rng: random.Random) -> Iterator[Piece]:
    """Yield variables, each but the first ones computed from one that was not used before."""
    values: dict[str, int] = {}
    unused: list[str] = []
    for name in rng.sample(NAMES, len(NAMES)):
        if len(unused) < UNUSED:
            values[name] = rng.randrange(100, 900)
        else:
            source, more = unused.pop(rng.randrange(len(unused))), rng.randrange(1, 10)
            values[name] = values[source] + more
            yield from (Piece(f" {source}"), Piece(f"{values[source]}", source, asked=True))
            yield Piece(f" + {more} =")
        yield from (Piece(f" {name}"), Piece(f"{values[name]}", name), Piece(".\n"))
        unused.append(name)


def edits(rng: random.Random) -> Iterator[Piece]:
    """Yield things that are put on shelves, and removed from them."""
    shelves: dict[str, int] = {}
    for name in rng.sample(NAMES, len(NAMES)):
        if len(shelves) >= UNUSED:
            removed = rng.choice(list(shelves))
            yield Piece(f"Remove {removed} from shelf")
            yield Piece(f" {shelves.pop(removed)}", removed, asked=True)
            yield Piece(". ")
        shelves[name] = rng.randrange(100, 1000)
        yield Piece(f"Put {name} on shelf")
        yield from (Piece(f" {shelves[name]}", name), Piece(".\n"))


KINDS: Mapping[str, Callable[[random.Random], Iterator[Piece]]] = {
    "variables": variables,
    "edits": edits,
}


@dataclass(frozen=True)
class Traces(Output):
    """Traces. ``answers`` is [W, S]: look-ups, from 0; -1 elsewhere.

    Args:
        distances: [W, S], int64, in tokens, of each token of a look-up.

    """

    distances: torch.Tensor

    @property
    def views(self) -> tuple[Task, ...]:
        """All look-ups; those nearer than an eighth of the trace; those beyond a quarter of it."""
        near, far = self.distances < self.length // 8, self.distances >= self.length // 4
        return self, self._only("near", near), self._only("far", far)

    def _only(self, name: str, which: torch.Tensor) -> Traces:
        answers = self.answers.masked_fill(~which, -1)
        return replace(self, name=f"{self.name}, {name}", answers=answers)

    def figures(self, nats: torch.Tensor, first: torch.Tensor, slots: int) -> list[float]:
        """One for each trace: the share of its look-ups that find each token of their values."""
        found = []
        for which, hit in zip(self.answers, first, strict=True):
            lookups = [hit[which == i].all() for i in which[which >= 0].unique()]
            found.append(float(torch.stack(lookups).to(torch.float64).mean()))
        return found


def traces(
    tokenizer: Tokenizer, kind: str, seed: int, count: int, length: int = 1024, prompt: int = 32
) -> Traces:
    """Traces of one kind; look-ups in the first quarter of a trace do not count.

    Args:
        tokenizer: of the model.
        kind: of :data:`KINDS`.
        seed: of everything that is drawn.
        count: traces.
        length: tokens of each.
        prompt: of them, those that are not forced.

    """
    ids = torch.zeros(count, length, dtype=torch.int64)
    answers, distances = torch.full_like(ids, -1), torch.zeros_like(ids)
    for row in range(count):
        tokens: list[int] = []
        written: dict[str, int] = {}
        for number, piece in enumerate(KINDS[kind](random.Random(f"{seed} {kind} {row}"))):
            own = encode(tokenizer, piece.text)
            begin, end = len(tokens), len(tokens) + len(own)
            tokens += own
            if piece.asked and begin >= length // 4 and end <= length:
                answers[row, begin:end] = number
                distances[row, begin:end] = begin - written[piece.name]
            elif piece.name:
                written[piece.name] = begin
        if len(tokens) < length:
            raise ValueError(f"a trace of {kind} has {len(tokens)} tokens, not {length}")
        ids[row] = torch.tensor(tokens[:length])
    parts = (t[:, prompt:] for t in (ids, answers, distances))
    task = Traces(kind, ids[:, :prompt], *parts)
    if not all((view.answers >= 0).any(1).all() for view in task.views):
        raise ValueError(f"a trace of {kind} in {length} tokens has no near or no far look-up")
    return task
