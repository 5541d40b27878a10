# SPDX-License-Identifier: Apache-2.0
"""Tasks for a model: a context, evicted from at its end, and forced tokens after it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from benchmarks.quality.texts import documents, questions, windows

NOUNS = """
    lion river house table garden window mountain teacher bridge train doctor island captain kitchen
    forest letter market school church tower camera engine piano king queen horse wolf eagle
"""


@dataclass(frozen=True)
class Task:
    """W instances of one length.

    Args:
        name: in tables.
        context: [W, n] token ids: a text, or what is to be remembered, in prose.
        tail: [W, S] token ids: how it goes on, or the question and its answer, or several of them.
        answers: [S], int64: which answer, from 0, a token belongs to; -1 elsewhere. Without any the
            tail is prose, and judged by what it costs.

    """

    name: str
    context: torch.Tensor
    tail: torch.Tensor
    answers: torch.Tensor

    @property
    def length(self) -> int:
        """Tokens that budgets are shares of: a text with its tail, a context without questions."""
        return int(self.context.shape[1]) + (int(self.tail.shape[1]) if self.costs else 0)

    @property
    def costs(self) -> bool:
        """Whether figures are nats: less is better. Otherwise they are answers found."""
        return bool((self.answers < 0).all())

    @property
    def decimals(self) -> int:
        """Digits of a figure that a row keeps behind the point."""
        return 3 if self.costs else 0

    @property
    def views(self) -> tuple[Task, ...]:
        """Tasks of the same tokens, each with a row of its own."""
        return (self,)

    def figures(self, nats: torch.Tensor, first: torch.Tensor, slots: int) -> list[float]:
        """One for each window, or for each answer.

        Of prose those tokens count that an eviction precedes: not the first of a tail, which
        follows the context as it was computed, and none before the budget is full.

        Args:
            nats: [W, S], what tokens of the tail cost.
            first: [W, S], whether each was the model's own choice.
            slots: of the budget that this is, or is compared with.

        """
        if self.costs:
            counted = max(1, slots - int(self.context.shape[1]) + 1)
            return list(nats[:, counted:].mean(1).tolist())
        which = range(int(self.answers.max()) + 1)
        return [float(hit) for i in which for hit in first[:, self.answers == i].all(1)]


@dataclass(frozen=True)
class Choices(Task):
    """Questions, with a window for each option: which one costs the least, for each of its tokens?

    ``answers`` is [W, S] here: 0 in an option, -1 elsewhere.

    Args:
        right: [Q], int64: the right option of each question.

    """

    right: torch.Tensor

    def figures(self, nats: torch.Tensor, first: torch.Tensor, slots: int) -> list[float]:
        """One for each question: whether the right option was chosen."""
        counts = self.answers >= 0
        cost = (nats * counts).sum(1) / counts.sum(1)
        chosen = cost.view(len(self.right), -1).argmin(1)
        return [float(hit) for hit in chosen == self.right]


def commonsense(tokenizer: Tokenizer, count: int, shots: int = 10) -> Task:
    """CommonsenseQA: five options each; the context is ``shots`` other questions with answers."""
    lines = questions("CommonsenseQA/validation.jsonl")
    lines = [line for line in lines if line["options"].count("\n") == 5][: shots + count]

    def asked(line: dict[str, str]) -> str:
        return f"Question: {line['question']}\nAnswer:"

    def options(line: dict[str, str]) -> list[str]:
        return [option[2:] for option in line["options"].strip().split("\n")]

    examples = [f"{asked(line)}{line['answer'][2:]}\n\n" for line in lines[:shots]]
    context = _ids(tokenizer, "".join(examples))
    rows = [
        (_ids(tokenizer, asked(line)), _ids(tokenizer, option))
        for line in lines[shots:]
        for option in options(line)
    ]
    size = max(len(question) + len(option) for question, option in rows)
    tail = torch.zeros(len(rows), size, dtype=torch.int64)
    answers = torch.full((len(rows), size), -1)
    for row, (question, option) in enumerate(rows):
        end = len(question) + len(option)
        tail[row, :end] = torch.tensor(question + option)
        answers[row, len(question) : end] = 0
    right = [options(line).index(line["answer"][2:]) for line in lines[shots:]]
    contexts = torch.tensor(context).expand(len(rows), -1)
    return Choices("commonsense", contexts, tail, answers, torch.tensor(right))


@dataclass(frozen=True)
class Output(Task):
    """Long outputs: budgets are shares of contexts and tails, and a figure is a share."""

    @property
    def length(self) -> int:
        """Tokens of a text in the end."""
        return int(self.context.shape[1] + self.tail.shape[1])

    @property
    def decimals(self) -> int:
        """A figure is a share."""
        return 3


def prose(tokenizer: Tokenizer, names: Sequence[str], count: int, length: int, tail: int) -> Task:
    """Windows of real texts, in the order of the texts: how does each go on?

    Args:
        tokenizer: of the model.
        names: of texts.
        count: windows of each.
        length: of a window.
        tail: the part of it that is forced.

    """
    ids = torch.cat([windows(tokenizer, name, count, length) for name in names])
    cut = length - tail
    return Task("prose", ids[:, :cut], ids[:, cut:], torch.full((tail,), -1))


def passkey(tokenizer: Tokenizer, count: int, length: int, seed: int = 0) -> Task:
    """A five-digit pass key, said once in prose, at depths spread over [0, 1]."""

    def instance(
        index: int, rng: random.Random
    ) -> tuple[list[tuple[float, str]], list[tuple[str, str]]]:
        key = f"{rng.randrange(10000, 100000)}"
        depth = index / max(count - 1, 1)
        fact = f" The pass key is {key}. Remember it. The pass key is {key}."
        question = "\n\nQuestion: What is the pass key?\nAnswer: The pass key is "
        return [(depth, fact)], [(question, key)]

    return _build("passkey", tokenizer, count, length, seed, instance)


def pairs(tokenizer: Tokenizer, count: int, length: int, seed: int = 0) -> Task:
    """Eight nouns, each with a four-digit code, spread over prose; all are asked for."""
    single = [noun for noun in NOUNS.split() if len(_ids(tokenizer, f" {noun}")) == 1]

    def instance(
        index: int, rng: random.Random
    ) -> tuple[list[tuple[float, str]], list[tuple[str, str]]]:
        nouns = rng.sample(single, 8)
        codes = [f"{rng.randrange(1000, 10000)}" for _ in nouns]
        said = [
            (i / 8, f" {noun}: {code}.")
            for i, (noun, code) in enumerate(zip(nouns, codes, strict=True))
        ]
        order = rng.sample(range(8), 8)
        asked = [(f" {nouns[i]}: ", codes[i]) for i in order]
        asked = [(f"{'.' if j else ''}{q}", a) for j, (q, a) in enumerate(asked)]
        return said, asked

    return _build("pairs", tokenizer, count, length, seed, instance)


Instance = Callable[[int, random.Random], tuple[list[tuple[float, str]], list[tuple[str, str]]]]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _build(
    name: str, tokenizer: Tokenizer, count: int, length: int, seed: int, instance: Instance
) -> Task:
    hays = _ids(tokenizer, "\n\n".join(documents("union_1920s")))
    contexts, tails, answers = [], [], []
    for index in range(count):
        rng = random.Random(f"{seed} {index}")
        said, asked = instance(index, rng)
        facts = [(depth, _ids(tokenizer, text)) for depth, text in said]
        room = length - sum(len(fact) for _, fact in facts)
        start = rng.randrange(len(hays) - room)
        hay = hays[start : start + room]
        context: list[int] = []
        used = 0
        for depth, fact in facts:
            upto = int(depth * room)
            context += hay[used:upto] + fact
            used = upto
        contexts.append(context + hay[used:])
        tail: list[int] = []
        which: list[int] = []
        for number, (question, answer) in enumerate(asked):
            whole = _ids(tokenizer, question + answer)
            cut = len(_ids(tokenizer, question))
            tail += whole
            which += [-1] * cut + [number] * (len(whole) - cut)
        tails.append(tail)
        answers.append(which)
    if any(which != answers[0] for which in answers):
        raise ValueError("the questions differ in length")
    name = f"{name}, seed {seed}" if seed else name
    return Task(name, torch.tensor(contexts), torch.tensor(tails), torch.tensor(answers[0]))
