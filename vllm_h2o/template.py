# SPDX-License-Identifier: Apache-2.0
"""Check whether a chat template reproduces generated tokens in the next turn's prompt.

A turn's text is its prompt and the generated tokens of its answer. The template builds the next
turn's prompt from messages. The turn continues from the cache if its prompt begins with that text.

What a model generates for a tool call or for its thoughts is read off the template itself, which it
was trained with; :data:`CALL` and :data:`THOUGHT` are for templates that write neither.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError

Message = dict[str, Any]

SYSTEM: Message = {"role": "system", "content": "You keep a lighthouse."}
ASKED: tuple[Message, Message] = (
    {"role": "user", "content": "Who lit the lamp?"},
    {"role": "user", "content": "And then?"},
)
ANSWER = "The old keeper did, at dusk."
REASONING = "Who was there?"
THOUGHT = "<think>\n{}\n</think>\n\n"
"""Thoughts before an answer, as most models that have any write them."""
ARGUMENTS: Message = {"name": "the keeper", "nights": [3, 4]}
TOOL: Message = {
    "name": "read_log",
    "description": "Read the log.",
    "parameters": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "Of whom."},
            "nights": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "When.",
            },
        },
        "required": ["name", "nights"],
    },
}
CALL = '<tool_call>\n{{"name": "read_log", "arguments": {}}}\n</tool_call>'
"""A call in the format of Hermes, for templates that write none."""
COMPACT, SPACED = (",", ":"), (", ", ": ")
"""Separators of JSON."""

_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")


class Chat:
    """Writes prompts, and answers as a model would generate them.

    Args:
        tokenizer: tokenizer of ``transformers``.
        template: chat template in place of the tokenizer's.

    """

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        self._tokenizer, self._template = tokenizer, template
        self.first = [SYSTEM, ASKED[0]]
        try:
            self.text(self.first)
        except TemplateError:
            self.first = [ASKED[0]]  # some templates refuse a system message

    def text(self, messages: Sequence[Message], tools: bool = False, opens: bool = True) -> str:
        """The template's text of messages.

        Args:
            messages: the whole conversation.
            tools: whether the request has tools.
            opens: whether an answer begins at the end.

        """
        text: str = self._tokenizer.apply_chat_template(
            list(messages),
            tools=[{"type": "function", "function": TOOL}] if tools else None,
            tokenize=False,
            add_generation_prompt=opens,
            chat_template=self._template,
        )
        return text

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text whose special tokens are written out."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return str(self._tokenizer.decode(tokens))

    def written(self, message: Message, tools: bool) -> str:
        """An answer as the template writes it, without the end of its turn."""
        asked = self.text(self.first, tools)
        plain = self.text([*self.first, answered(ANSWER)], tools, opens=False)
        whole = self.text([*self.first, message], tools, opens=False)
        end = plain.rpartition(ANSWER)[2]
        return whole[len(commonprefix([asked, whole])) :].removesuffix(end)


@dataclass(frozen=True)
class Kind:
    """A kind of answer.

    Args:
        what: its description.
        message: what the client sends back.
        generate: returns the text that the model generated.
        next: messages after the answer.
        tools: whether the requests have tools.

    """

    what: str
    message: Message
    generate: Callable[[Chat], str]
    next: tuple[Message, ...] = (ASKED[1],)
    tools: bool = False


@dataclass(frozen=True)
class Finding:
    """The result of one kind of answer.

    Args:
        what: the kind of answer.
        num_tokens: tokens of the first turn: its prompt and the answer.
        num_begun: tokens of these with which the second turn's prompt begins.
        expected: the generated text after them.
        found: the template's text after them.
        refused: the template's own message, if it takes no such conversation.

    """

    what: str
    num_tokens: int = 0
    num_begun: int = 0
    expected: str = ""
    found: str = ""
    refused: str = ""

    @property
    def continues(self) -> bool:
        """Whether the second turn continues from the first one's cache."""
        return not self.refused and self.num_begun == self.num_tokens

    def lines(self) -> list[str]:
        """The result in words."""
        if self.refused:
            return [f"{self.what}: refused by the template: {self.refused}"]
        if self.continues:
            return [f"{self.what}: continues"]
        return [
            f"{self.what}: starts anew, at token {self.num_begun} of {self.num_tokens}",
            f"  generated {self.expected!r}",
            f"  template  {self.found!r}",
        ]


def findings(tokenizer: Any, template: str | None = None) -> list[Finding]:
    """Check each of :data:`KINDS`, after a system message where the template takes one.

    Args:
        tokenizer: tokenizer of ``transformers``.
        template: chat template in place of the tokenizer's.

    """
    chat = Chat(tokenizer, template)
    return [_finding(chat, kind) for kind in KINDS]


def _finding(chat: Chat, kind: Kind) -> Finding:
    try:
        asked = chat.text(chat.first, kind.tools)
        generated = kind.generate(chat)
        second = chat.text([*chat.first, kind.message, *kind.next], kind.tools)
    except (TemplateError, TypeError) as error:  # some add arguments to a string
        return Finding(kind.what, refused=str(error))
    # An answer's last token, its end of sequence, is never computed.
    text, again = [*chat.tokens(asked), *chat.tokens(generated)], chat.tokens(second)
    pairs = enumerate(zip(text, again, strict=False))
    begun = next((i for i, (a, b) in pairs if a != b), min(len(text), len(again)))
    rest = [chat.decode(tokens[begun : begun + 8]) for tokens in (text, again)]
    return Finding(kind.what, len(text), begun, *rest)


def answered(content: str, **more: Any) -> Message:
    """An answer as a client sends it back."""
    return {"role": "assistant", "content": content, **more}


def calling(num: int = 1, **more: Any) -> Message:
    """An answer of tool calls as vLLM hands it to a template: arguments are parsed."""
    function = {"name": TOOL["name"], "arguments": ARGUMENTS}
    calls = [{"id": _id(i), "type": "function", "function": function} for i in range(num)]
    return answered("", tool_calls=calls, **more)


def _id(index: int) -> str:
    """The id that the server gives a call; Mistral's templates want nine letters and digits."""
    return f"call{index:05}"


def _results(num: int = 1) -> tuple[Message, ...]:
    """Results of tool calls."""
    return tuple(
        {"role": "tool", "tool_call_id": _id(i), "name": TOOL["name"], "content": "He was there."}
        for i in range(num)
    )


def _restyled(text: str, separators: tuple[str, str]) -> str:
    """A text whose JSON values are written with these separators, without ids of calls.

    The server makes the ids, so a model generates none within JSON.
    """
    decoder, parts, start = json.JSONDecoder(object_hook=_without_id), [], 0
    while start < len(text):
        end, part = start + 1, text[start]
        if part in "{[":
            try:
                value, end = decoder.raw_decode(text, start)
                part = json.dumps(value, ensure_ascii=False, separators=separators)
            except json.JSONDecodeError:
                pass
        parts.append(part)
        start = end
    return "".join(parts)


def _without_id(value: Message) -> Message:
    return {key: each for key, each in value.items() if key != "id"}


def _calls(num: int, separators: tuple[str, str] | None, reasoning: str = "") -> Any:
    """Return a function that generates tool calls, after thoughts if there are any."""

    def generate(chat: Chat) -> str:
        text = _EMPTY_THOUGHT.sub("", chat.written(calling(num), tools=True), count=1)
        if text.count(str(ARGUMENTS["name"])) < num:
            text = "\n".join([CALL.format(json.dumps(ARGUMENTS))] * num)
        text = text if separators is None else _restyled(text, separators)
        return _thought(chat, reasoning, True) + text if reasoning else text

    return generate


def _json(value: Any) -> Callable[[Chat], str]:
    """Return a function that generates bare JSON."""
    return lambda _: json.dumps(value)


def _reasoned(chat: Chat) -> str:
    """Generate thoughts and an answer."""
    return _thought(chat, REASONING, False) + ANSWER


def _thought(chat: Chat, reasoning: str, tools: bool) -> str:
    """Thoughts as the template writes them before an answer, or as most models do."""
    message = answered(ANSWER, reasoning=reasoning, reasoning_content=reasoning)
    before, answer, _ = chat.written(message, tools).rpartition(ANSWER)
    return before if answer and reasoning in before else _begun(chat, THOUGHT.format(reasoning))


def _begun(chat: Chat, text: str) -> str:
    """Thoughts without their beginning where the prompt has it."""
    opens = chat.text(chat.first).rstrip().endswith("<think>")
    return text.removeprefix("<think>\n") if opens else text


def _says(text: str) -> Callable[[Chat], str]:
    """Return a function that generates a text."""
    return lambda chat: _begun(chat, text)


def _plain(what: str, text: str) -> Kind:
    return Kind(what, answered(text), _says(text))


_BACK: dict[str, Any] = {"reasoning": REASONING, "reasoning_content": REASONING}
_ONE: dict[str, Any] = {"next": _results(), "tools": True}
_FORCED = {"name": TOOL["name"], "parameters": ARGUMENTS}

KINDS = (
    _plain("a plain answer", ANSWER),
    _plain(
        "an answer of several lines", "Two of them:\n\n- the keeper\n- his son\n\nBoth went up."
    ),
    _plain("an answer that begins with a space", " At dusk."),
    _plain("an answer that ends with blanks", "At dusk. \n\n"),
    _plain("thoughts that are sent back within the answer", THOUGHT.format(REASONING) + ANSWER),
    Kind("thoughts that are sent back as reasoning_content", answered(ANSWER, **_BACK), _reasoned),
    Kind("thoughts that are not sent back", answered(ANSWER), _reasoned),
    Kind("a plain answer of a request with tools", answered(ANSWER), _says(ANSWER), tools=True),
    Kind("a tool call as the template writes it", calling(), _calls(1, None), **_ONE),
    Kind("a tool call of compact JSON", calling(), _calls(1, COMPACT), **_ONE),
    Kind("a tool call of JSON with spaces", calling(), _calls(1, SPACED), **_ONE),
    Kind("several tool calls", calling(2), _calls(2, SPACED), _results(2), True),
    Kind("thoughts and a tool call", calling(**_BACK), _calls(1, SPACED, REASONING), **_ONE),
    Kind("tool_choice names a tool: bare JSON", calling(), _json(ARGUMENTS), **_ONE),
    Kind("tool_choice is required: a bare JSON list", calling(), _json([_FORCED]), **_ONE),
    Kind("an edited answer", answered(ANSWER.replace("dusk", "dawn")), _says(ANSWER)),
)
"""Kinds of answers. With a parser whose models keep their own format under ``tool_choice``, a
forced call is like any other."""
