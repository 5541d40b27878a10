"""Whether a chat template gives back what was generated, to the token.

A turn's text is the prompt that the template makes, and the answer's tokens as they were generated.
The next turn's prompt is made anew, by the template, of the messages. Only if it begins with that
text does it begin from the last turn's cache.
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
"""What is generated, by what it shows."""


@dataclass(frozen=True)
class Finding:
    """What a template makes of one answer.

    Args:
        what: of which kind.
        num_tokens: of the first turn: its prompt's, and the answer's.
        num_begun: of those, the ones that the second turn's prompt begins with.
        expected: the text after these, as it was generated.
        found: as the template has it.

    """

    what: str
    num_tokens: int
    num_begun: int
    expected: str
    found: str

    @property
    def continues(self) -> bool:
        """Whether the second turn begins from the first one's cache."""
        return self.num_begun == self.num_tokens


def findings(tokenizer: Any, template: str | None = None) -> list[Finding]:
    """Of each of :data:`ANSWERS`, with a system message before.

    Args:
        tokenizer: of ``transformers``.
        template: in place of its own.

    """
    return [_finding(tokenizer, template, what, answer) for what, answer in ANSWERS.items()]


def _finding(tokenizer: Any, template: str | None, what: str, answer: str) -> Finding:
    first = [SYSTEM, ASKED[0]]
    second = [*first, {"role": "assistant", "content": answer}, ASKED[1]]
    asked, again = (_prompt(tokenizer, template, messages) for messages in (first, second))
    # The last token of an answer says that it ends; it was never computed.
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
