# SPDX-License-Identifier: Apache-2.0
"""Check whether a chat template reproduces generated tokens in the next turn's prompt.

A turn's text is its prompt and the generated tokens of its answer. The template builds the next
turn's prompt from messages. The turn continues from the cache if its prompt begins with that text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, str]

SYSTEM = {"role": "system", "content": "You keep a lighthouse."}
ASKED = ({"role": "user", "content": "Who lit the lamp?"}, {"role": "user", "content": "And then?"})
ANSWERS = {
    "a plain answer": "The old keeper did, at dusk.",
    "an answer of several lines": "Two of them:\n\n- the keeper\n- his son\n\nBoth went up.",
    "an answer that begins and ends with a space": " At dusk. ",
    "an answer that begins with its thoughts": "<think>\nWho was there?\n</think>\n\nThe keeper.",
}
"""Generated answers, by what they test."""


@dataclass(frozen=True)
class Finding:
    """The result of one answer.

    Args:
        what: the kind of answer.
        num_tokens: tokens of the first turn: its prompt and the answer.
        num_begun: tokens of these with which the second turn's prompt begins.
        expected: the generated text after them.
        found: the template's text after them.

    """

    what: str
    num_tokens: int
    num_begun: int
    expected: str
    found: str

    @property
    def continues(self) -> bool:
        """Whether the second turn continues from the first one's cache."""
        return self.num_begun == self.num_tokens


def findings(tokenizer: Any, template: str | None = None) -> list[Finding]:
    """Check each of :data:`ANSWERS`, after a system message.

    Args:
        tokenizer: tokenizer of ``transformers``.
        template: chat template in place of the tokenizer's.

    """
    return [_finding(tokenizer, template, what, answer) for what, answer in ANSWERS.items()]


def _finding(tokenizer: Any, template: str | None, what: str, answer: str) -> Finding:
    first = [SYSTEM, ASKED[0]]
    second = [*first, {"role": "assistant", "content": answer}, ASKED[1]]
    asked, again = (_prompt(tokenizer, template, messages) for messages in (first, second))
    # An answer's last token, its end of sequence, is never computed.
    text = [*asked, *tokenizer.encode(answer, add_special_tokens=False)]
    pairs = enumerate(zip(text, again, strict=False))
    begun = next((i for i, (a, b) in pairs if a != b), min(len(text), len(again)))
    rest = [tokenizer.decode(tokens[begun : begun + 8]) for tokens in (text, again)]
    return Finding(what, len(text), begun, *rest)


def _prompt(tokenizer: Any, template: str | None, messages: Sequence[Message]) -> list[int]:
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True, chat_template=template
    )
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
