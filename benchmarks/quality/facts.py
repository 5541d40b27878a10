# SPDX-License-Identifier: Apache-2.0
"""Facts as a user states them: a word, name, code, date or phrase, said once in real prose.

Every instance has a hay of its own, a sentence of it that states a fact, and a question. What
differs between forms is where the question stands:

- ``asked_now``: at the prompt's end, so that it is there when the prompt is evicted from;
- ``asked_later``: after that, forced token by token;
- ``one_of_many``: as ``asked_now``, with facts of the four other kinds in the hay, too;
- ``instructed``: as ``asked_now``, with some forty tokens of instructions behind the question;
- ``turns``: a chat; the fact is in the first turn of three, and asked for in the last.

The answer is forced, after eviction: a sentence that leads to the fact, and the fact, which is
found when each of its tokens is the model's own first choice.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from tokenizers import Tokenizer

from benchmarks.quality.phrasings import Phrasing, Source
from benchmarks.quality.tasks import Task
from benchmarks.quality.texts import documents

FORMS = ("asked_now", "asked_later", "one_of_many", "instructed", "turns")
KINDS = ("word", "name", "code", "date", "phrase")
COUNT = 50
LENGTHS = range(2, 13)
"""Tokens of a fact."""
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n"


@dataclass(frozen=True)
class Fact:
    """One fact, stated.

    Args:
        kind: of :data:`KINDS`.
        phrasing: how it is stated and asked for.
        subject: what it is about.
        value: the fact itself.
        depth: where it is stated: the share of the hay before it, about.

    """

    kind: str
    phrasing: Phrasing
    subject: str
    value: str
    depth: float

    def fill(self, sentence: str) -> str:
        """A sentence of the phrasing about this fact."""
        return sentence.format(s=self.subject, f=self.value)


@dataclass(frozen=True)
class Facts(Task):
    """Questions for facts. ``answers`` is [W, S] here: 0 in a fact, -1 elsewhere.

    Args:
        facts: of each instance; the first is asked for.
        hays: the text that the hay of each instance is from.

    """

    facts: tuple[tuple[Fact, ...], ...]
    hays: tuple[str, ...]

    def figures(self, nats: torch.Tensor, first: torch.Tensor, slots: int) -> list[float]:
        """One for each instance: whether all of the fact was found."""
        return [float(hit) for hit in (first | (self.answers < 0)).all(1)]


@dataclass(frozen=True)
class Parts:
    """An instance in pieces: token ids.

    Args:
        before: of the hay.
        middle: between the two halves of the hay; empty: it is one.
        after: the end of the prompt.
        tail: what is forced: the answer, and what comes before it but after the prompt.
        size: tokens of the fact, at the end of the tail.

    """

    before: list[int]
    middle: list[int]
    after: list[int]
    tail: list[int]
    size: int


def facts(
    tokenizer: Tokenizer, source: Source, form: str, count: int = COUNT, length: int = 1024
) -> Facts:
    """A set of instances, each of which asks for one fact.

    All forms of a source have the same facts at the same depths, in hays that begin alike.

    Args:
        tokenizer: of the model.
        source: what they are made from.
        form: of :data:`FORMS`.
        count: instances.
        length: tokens of the prompts.

    """
    contexts, tails, sizes, stated, hays = [], [], [], [], []
    for index, depth in enumerate(depths(source, count)):
        rng = random.Random(f"{source.seed} {index}")
        drawn = draw(tokenizer, source, index, depth, rng)
        drawn = drawn if form == "one_of_many" else drawn[:1]
        parts = pieces(tokenizer, source, form, index, drawn[0])
        hays.append(source.texts[index // len(KINDS) % len(source.texts)])
        contexts.append(_context(tokenizer, hays[-1], drawn, parts, length, rng))
        tails.append(parts.tail)
        sizes.append(parts.size)
        stated.append(drawn)
    width = max(map(len, tails))
    tail = torch.zeros(count, width, dtype=torch.int64)
    answers = torch.full((count, width), -1)
    for row, (ids, size) in enumerate(zip(tails, sizes, strict=True)):
        tail[row, : len(ids)] = torch.tensor(ids)
        answers[row, len(ids) - size : len(ids)] = 0
    name = form if source.name == "confirmation" else f"{form}, {source.name}"
    return Facts(name, torch.tensor(contexts), tail, answers, tuple(stated), tuple(hays))


def depths(source: Source, count: int) -> list[float]:
    """Where each instance states its fact: shares of the hay before it, spread evenly."""
    spread = [(i + 0.5) / count for i in range(count)]
    random.Random(f"{source.seed} depths").shuffle(spread)
    return spread


def document(
    tokenizer: Tokenizer, source: Source, count: int, length: int, number: int = 0
) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    """A document that states many facts, to be asked for one after the other.

    Args:
        tokenizer: of the model.
        source: what they are made from.
        count: facts, each of another kind or about another subject than the others.
        length: tokens of the document.
        number: of the document.

    Returns:
        Its token ids, and for each fact those of a question with how the answer begins, and those
        of the fact.

    """
    rng = random.Random(f"{source.seed} document {number}")
    pairs = [(kind, subject) for kind in KINDS for subject in source.subjects]
    drawn = [
        _stated(tokenizer, source, kind, subject, index, rng.random(), rng)
        for index, (kind, subject) in enumerate(rng.sample(pairs, count))
    ]
    asked = [pieces(tokenizer, source, "asked_later", 0, fact) for fact in drawn]
    text = source.texts[number % len(source.texts)]
    own = replace(asked[0], before=[], middle=[], after=[])
    return (
        _context(tokenizer, text, drawn, own, length, rng),
        [(parts.tail[: -parts.size], parts.tail[-parts.size :]) for parts in asked],
    )


def draw(
    tokenizer: Tokenizer, source: Source, index: int, depth: float, rng: random.Random
) -> tuple[Fact, ...]:
    """A fact of each kind, about different subjects, the one that is asked for first.

    Kinds take turns, and so do the phrasings of a kind.
    """
    first = index % len(KINDS)
    kinds = KINDS[first:] + KINDS[:first]
    subjects = rng.sample(list(source.subjects), len(kinds))
    found = []
    for number, (kind, subject) in enumerate(zip(kinds, subjects, strict=True)):
        phrasing = index // len(KINDS) + number
        fact = _stated(tokenizer, source, kind, subject, phrasing, depth, rng)
        found.append(replace(fact, depth=rng.random()) if number else fact)
    return tuple(found)


def _stated(
    tokenizer: Tokenizer,
    source: Source,
    kind: str,
    subject: str,
    phrasing: int,
    depth: float,
    rng: random.Random,
) -> Fact:
    """A fact of a kind about a subject, in the phrasing of a number, counted round."""
    value = source.draw[kind](rng)
    while len(encode(tokenizer, f" {value}")) not in LENGTHS:
        value = source.draw[kind](rng)
    phrasings = source.phrasings[kind]
    return Fact(kind, phrasings[phrasing % len(phrasings)], subject, value, depth)


def pieces(tokenizer: Tokenizer, source: Source, form: str, index: int, fact: Fact) -> Parts:
    """The text around the hay, and the text after the prompt."""
    question, lead = fact.fill(fact.phrasing.asked), fact.fill(fact.phrasing.lead)
    before = middle = ""
    if form == "turns":
        start, read, more, done = source.turns
        before = f"{SYSTEM}<|im_start|>user\n{start}"
        middle = f"<|im_end|>\n<|im_start|>assistant\n{read}<|im_end|>\n<|im_start|>user\n{more}"
        after = (
            f"<|im_end|>\n<|im_start|>assistant\n{done}<|im_end|>\n"
            f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )
        lead = lead.lstrip()
    else:
        instruction = source.instructions[index % len(source.instructions)]
        told = f" {instruction}" if form == "instructed" else ""
        after = f"\n\nQuestion: {question}{told}\nAnswer:"
    answer = f"{lead} {fact.value}"
    begun = after if form == "asked_later" else ""
    whole, cut = encode(tokenizer, begun + answer), encode(tokenizer, begun + lead)
    if whole[: len(cut)] != cut:
        raise ValueError(f"{answer!r} is not tokenized as its beginning is")
    return Parts(
        encode(tokenizer, before),
        encode(tokenizer, middle),
        [] if begun else encode(tokenizer, after),
        whole,
        len(whole) - len(cut),
    )


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids, without any of the tokenizer's own."""
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _context(
    tokenizer: Tokenizer,
    text: str,
    drawn: Sequence[Fact],
    parts: Parts,
    length: int,
    rng: random.Random,
) -> list[int]:
    """A prompt: facts in a hay that says nothing of them, and what stands around it."""
    said = [encode(tokenizer, f" {fact.fill(fact.phrasing.said)}") for fact in drawn]
    around = len(parts.before) + len(parts.middle) + len(parts.after)
    room = length - around - sum(map(len, said))
    hay, ends = _hay(tokenizer, text, length, drawn, rng)
    half = _nearest(ends, room // 2) if parts.middle else room
    reach = [end for end in ends if end <= half]
    places = [
        (_nearest(reach, fact.depth * half), ids) for fact, ids in zip(drawn, said, strict=True)
    ]
    if parts.middle:
        places.append((half, parts.middle))
    context, used = list(parts.before), 0
    for place, ids in sorted(places, key=lambda at: at[0]):
        context += hay[used:place] + ids
        used = place
    return context + hay[used:room] + parts.after


def _hay(
    tokenizer: Tokenizer, text: str, length: int, drawn: Sequence[Fact], rng: random.Random
) -> tuple[list[int], list[int]]:
    """Tokens of a text from a sentence's beginning on, and where sentences end."""
    whole, ends = _sentences(tokenizer, text)
    while True:
        start = rng.choice([end for end in ends if end + length <= len(whole)])
        hay = whole[start : start + length]
        plain = tokenizer.decode(hay).lower()
        if not any(x.lower() in plain for fact in drawn for x in (fact.value, fact.subject)):
            return hay, [end - start for end in ends if start <= end <= start + length]


@cache
def _sentences(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """All tokens of a text, and the indices behind its full stops."""
    stops = {id for token, id in tokenizer.get_vocab().items() if token.endswith((".", "?", "!"))}
    whole = encode(tokenizer, "\n\n".join(documents(text)))
    return whole, [i + 1 for i, token in enumerate(whole) if token in stops]


def _nearest(places: Sequence[int], wanted: float) -> int:
    return min(places, key=lambda place: abs(place - wanted))
