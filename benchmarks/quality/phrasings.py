# SPDX-License-Identifier: Apache-2.0
"""Two sets of words and sentences for facts, with nothing in common.

Sentences were shaped on the development set alone, until the model answered most of it with its
full cache; nobody looked at what it answers of the confirmation set while doing so.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Phrasing:
    """A way to state a fact, and to ask for it; ``{s}`` is a subject and ``{f}`` the fact.

    Args:
        said: a sentence.
        asked: the question.
        lead: how the answer begins, up to the fact.

    """

    said: str
    asked: str
    lead: str


@dataclass(frozen=True)
class Source:
    """The material of one set of tasks.

    Args:
        name: of the set.
        seed: of everything that is drawn.
        texts: the hays, names in :data:`benchmarks.quality.texts.TEXTS`.
        subjects: what facts are about.
        phrasings: by kind of fact.
        draw: one fact, by its kind.
        instructions: about forty tokens each, for between a question and its answer.
        turns: what a user says with the first text, what is answered, the same for the second.

    """

    name: str
    seed: int
    texts: Sequence[str]
    subjects: Sequence[str]
    phrasings: Mapping[str, Sequence[Phrasing]]
    draw: Mapping[str, Callable[[random.Random], str]]
    instructions: Sequence[str]
    turns: tuple[str, str, str, str]


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _one(words: str) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(_listed(words))


def _joined(*lists: str) -> Callable[[random.Random], str]:
    return lambda rng: " ".join(rng.choice(_listed(words)) for words in lists)


def _code_with_letters_first(rng: random.Random) -> str:
    letters = "".join(rng.sample("BCDFGHJKLMNPQRSTVWXZ", 2))
    return f"{letters}-{rng.randrange(1000, 10000)}"


def _code_with_letters_last(rng: random.Random) -> str:
    return f"{rng.randrange(100, 1000)}-{''.join(rng.sample('BCDFGHJKLMNPQRSTVWXZ', 3))}"


MONTHS = _listed(
    "January, February, March, April, May, June, "
    "July, August, September, October, November, December"
)


def _day_first(rng: random.Random) -> str:
    return f"{rng.randrange(1, 29)} {rng.choice(MONTHS[::2])} {rng.randrange(2027, 2060)}"


def _month_first(rng: random.Random) -> str:
    return f"{rng.choice(MONTHS[1::2])} {rng.randrange(1, 29)}, {rng.randrange(2061, 2095)}"


DEVELOPMENT = Source(
    name="development",
    seed=1,
    texts=("union_1850s", "union_1920s"),
    subjects=_listed(
        "lamp room, old mill, boat house, north tower, music school, bakery, glass factory, "
        "toy museum, railway station, fish market, chess club, bicycle shop"
    ),
    phrasings={
        "word": (
            Phrasing(
                "The password of the {s} is the word {f}.",
                "What is the password of the {s}?",
                " The password of the {s} is the word",
            ),
            Phrasing(
                "The cat that lives in the {s} is called {f}.",
                "What is the cat that lives in the {s} called?",
                " The cat that lives in the {s} is called",
            ),
            Phrasing(
                "The favourite dish at the {s} is {f}.",
                "What is the favourite dish at the {s}?",
                " The favourite dish at the {s} is",
            ),
        ),
        "name": (
            Phrasing(
                "The keeper of the {s} is a man called {f}.",
                "What is the keeper of the {s} called?",
                " The keeper of the {s} is a man called",
            ),
            Phrasing(
                "The {s} was designed by {f}.",
                "Who designed the {s}?",
                " The {s} was designed by",
            ),
            Phrasing(
                "If you have questions about the {s}, please call {f}.",
                "Whom should I call if I have questions about the {s}?",
                " If you have questions about the {s}, please call",
            ),
        ),
        "code": (
            Phrasing(
                "The code for the {s} is {f}.",
                "What is the code for the {s}?",
                " The code for the {s} is",
            ),
            Phrasing(
                "The licence plate of the van from the {s} is {f}.",
                "What is the licence plate of the van from the {s}?",
                " The licence plate of the van from the {s} is",
            ),
            Phrasing(
                "On the door of the {s} you can read {f}.",
                "What can you read on the door of the {s}?",
                " On the door of the {s} you can read",
            ),
        ),
        "date": (
            Phrasing(
                "The {s} will be opened on {f}.",
                "When will the {s} be opened?",
                " The {s} will be opened on",
            ),
            Phrasing(
                "The contract with the {s} ends on {f}.",
                "When does the contract with the {s} end?",
                " The contract with the {s} ends on",
            ),
            Phrasing(
                "We meet again at the {s} on {f}.",
                "When do we meet again at the {s}?",
                " We meet again at the {s} on",
            ),
        ),
        "phrase": (
            Phrasing(
                "The key of the {s} is hidden under the {f}.",
                "Where is the key of the {s} hidden?",
                " The key of the {s} is hidden under the",
            ),
            Phrasing(
                "The plans of the {s} were found inside the {f}.",
                "Where were the plans of the {s} found?",
                " The plans of the {s} were found inside the",
            ),
            Phrasing(
                "Visitors of the {s} leave their umbrellas behind the {f}.",
                "Where do visitors of the {s} leave their umbrellas?",
                " Visitors of the {s} leave their umbrellas behind the",
            ),
        ),
    },
    draw={
        "word": _one(
            "marigold, pumpernickel, kaleidoscope, juniper, gooseberry, zeppelin, ratatouille, "
            "hollyhock, saxophone, tamarind, butterscotch, dandelion, rhubarb, porridge"
        ),
        "name": _joined(
            "Albert, Rupert, Maximilian, Oswald, Humphrey, Leopold, Benedict, Cornelius",
            "Calloway, Finsbury, Okonkwo, Lindqvist, Marchetti, Penhallow, Rasmussen, Tolliver",
        ),
        "code": _code_with_letters_first,
        "date": _day_first,
        "phrase": _joined(
            "yellow, broken, second, little",
            "piano, chimney, bookcase, bathtub, staircase, flowerpot",
            "near the window, on the left, of the gardener",
        ),
    },
    instructions=(
        "Please answer in one short sentence. Use only what the text above says, do not add an "
        "explanation, do not repeat the question, and do not mention the text itself or where "
        "in it you found the answer.",
        "Write the answer as a plain English sentence without quotation marks. If there is more "
        "than one answer in the text, give the first one. Be brief, be polite, and do not make "
        "anything up.",
    ),
    turns=(
        "I would like you to read something with me. This is the first part.\n\n",
        "Thank you, I have read the first part.",
        "This is the second part.\n\n",
        "Thank you, I have read the second part, too.",
    ),
)
CONFIRMATION = Source(
    name="confirmation",
    seed=2,
    texts=("moby_dick", "union_1990s"),
    subjects=_listed(
        "wine cellar, ferry terminal, puppet theatre, greenhouse, observatory, print shop, "
        "stone quarry, swimming pool, flower stall, courthouse, tennis hall, dairy farm"
    ),
    phrasings={
        "word": (
            Phrasing(
                "The horse that belongs to the {s} answers to the name {f}.",
                "Which name does the horse that belongs to the {s} answer to?",
                " The horse that belongs to the {s} answers to the name",
            ),
            Phrasing(
                "You get into the {s} when you say {f}.",
                "What do I have to say to get into the {s}?",
                " You get into the {s} when you say",
            ),
            Phrasing(
                "Every wall in the {s} smells of {f}.",
                "What does every wall in the {s} smell of?",
                " Every wall in the {s} smells of",
            ),
        ),
        "name": (
            Phrasing(
                "The new manager at the {s} is named {f}.",
                "What is the new manager at the {s} named?",
                " The new manager at the {s} is named",
            ),
            Phrasing(
                "Last year the {s} was sold to {f}.",
                "To whom was the {s} sold last year?",
                " Last year the {s} was sold to",
            ),
            Phrasing(
                "My cousin who works in the {s} has married {f}.",
                "Whom has my cousin who works in the {s} married?",
                " Your cousin who works in the {s} has married",
            ),
        ),
        "code": (
            Phrasing(
                "The safe in the {s} opens with the combination {f}.",
                "With which combination does the safe in the {s} open?",
                " The safe in the {s} opens with the combination",
            ),
            Phrasing(
                "The wireless network of the {s} has the key {f}.",
                "Which key does the wireless network of the {s} have?",
                " The wireless network of the {s} has the key",
            ),
            Phrasing(
                "The reference on the invoice from the {s} is {f}.",
                "What is the reference on the invoice from the {s}?",
                " The reference on the invoice from the {s} is",
            ),
        ),
        "date": (
            Phrasing(
                "Inspectors will visit the {s} on {f}.",
                "On which day will inspectors visit the {s}?",
                " Inspectors will visit the {s} on",
            ),
            Phrasing(
                "The wedding at the {s} has been moved to {f}.",
                "To which day has the wedding at the {s} been moved?",
                " The wedding at the {s} has been moved to",
            ),
            Phrasing(
                "The insurance for the {s} has to be paid by {f}.",
                "By when does the insurance for the {s} have to be paid?",
                " The insurance for the {s} has to be paid by",
            ),
        ),
        "phrase": (
            Phrasing(
                "The owner of the {s} sleeps above the {f}.",
                "Where does the owner of the {s} sleep?",
                " The owner of the {s} sleeps above the",
            ),
            Phrasing(
                "You will find the fuse box for the {s} beside the {f}.",
                "Where will I find the fuse box for the {s}?",
                " You will find the fuse box for the {s} beside the",
            ),
            Phrasing(
                "Letters for the {s} should be put below the {f}.",
                "Where should letters for the {s} be put?",
                " Letters for the {s} should be put below the",
            ),
        ),
    },
    draw={
        "word": _one(
            "cardamom, tangerine, bumblebee, marzipan, lavender, chandelier, mulberry, periwinkle, "
            "trombone, cinnamon, eucalyptus, gingerbread, sassafras, hyacinth"
        ),
        "name": _joined(
            "Agatha, Bertram, Philippa, Winston, Rosalind, Theodore, Ottilie, Montgomery",
            "Abernathy, Delacroix, Ishikawa, Kowalski, Mbeki, Stapleton, Vandermeer, Whitlock",
        ),
        "code": _code_with_letters_last,
        "date": _month_first,
        "phrase": _joined(
            "wooden, crooked, fourth, painted",
            "fountain, wardrobe, gateway, fireplace, cupboard, haystack",
            "in the corner, from the market, opposite the bridge",
        ),
    },
    instructions=(
        "Keep the reply to a single line, leave out titles and greetings, stay with the wording "
        "that was used further up, and stop as soon as everything that I wanted to know has "
        "been said.",
        "Reply as you would to a colleague who is in a hurry: no introduction, no list, no "
        "remarks about how sure you are. Spell everything exactly as it was spelled when you "
        "read it.",
    ),
    turns=(
        "Here is how the story starts; there is more to come.\n\n",
        "Understood. Please go on.",
        "And this is how it continues.\n\n",
        "Understood. What would you like to know?",
    ),
)
