# SPDX-License-Identifier: Apache-2.0
"""Requests whose greedy answers are known: asked alone, then in the crowd."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak.server import VOCABULARY, WORDS

Budget = float | int | str | None

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

NAMES = {"weather", "tide"}
"""Names of the tools that chats may call."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,  # else vLLM takes any JSON for arguments, which may have no end
            "parameters": {
                "type": "object",
                "properties": {
                    "unit": {"enum": ["C", "F", "K"]},
                    "day": {"enum": [1, 2, 3, 4, 5, 6, 7]},
                    "exact": {"type": "boolean"},
                },
                "required": ["unit", "day", "exact"],
                "additionalProperties": False,
            },
        },
    }
    for name in sorted(NAMES)
]
"""Tools whose arguments come to an end, whatever a model of random weights prefers."""


def tokens(chance: random.Random, length: int) -> list[int]:
    """Random tokens without special ones."""
    return [chance.randrange(3, VOCABULARY) for _ in range(length)]


def prompt(chance: random.Random, length: int) -> list[int]:
    """Random tokens; half of all prompts begin with more or less of the same ones."""
    common = tokens(random.Random(0), chance.randrange(length + 1) if chance.random() < 0.5 else 0)
    return [*common, *tokens(chance, length - len(common))]


def asking(budget: Budget) -> dict[str, Any]:
    """The field of a request with a budget of its own."""
    return {} if budget is None else {"vllm_xargs": {"kv_budget": budget}}


def calling(question: str, choice: str) -> dict[str, Any]:
    """Return the fields of a chat that ends in a call of a tool, without needless blanks.

    Args:
        question: of the user.
        choice: the name of the tool; ``required``: any of them.

    """
    named = {"type": "function", "function": {"name": choice}}
    return {
        "messages": [{"role": "user", "content": question}],
        "tools": TOOLS,
        "parallel_tool_calls": False,
        "logit_bias": {str(WORDS.index(blank)): -100 for blank in " \n"},
        "tool_choice": choice if choice == "required" else named,
    }


@dataclass(frozen=True)
class Canary:
    """A request whose greedy answer is known.

    Args:
        name: for the report.
        prompt_len: tokens of its prompt; 0: it is a chat.
        max_tokens: that follow.
        budget: of its own.
        more: other fields.

    """

    name: str
    prompt_len: int
    max_tokens: int
    budget: Budget = None
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Where it is asked."""
        return COMPLETIONS if self.prompt_len else CHAT

    @property
    def body(self) -> dict[str, Any]:
        """First in any queue, so that it is the last to be preempted."""
        body: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": 0, "priority": -1}
        if self.prompt_len:
            body["prompt"] = prompt(random.Random(self.name), self.prompt_len)
            body["ignore_eos"] = True
        return {**body, **asking(self.budget), **self.more}


CANARIES = (
    Canary("within the budget", 12, 40),
    Canary("past the budget", 60, 120),
    Canary("evicted prompt", 400, 48),
    Canary("smaller budget", 150, 60, 64),
    Canary("all is kept", 300, 40, "full"),
    Canary("beams", 150, 6, None, {"n": 3, "use_beam_search": True}),
    Canary("tool call", 0, 200, None, calling("Will it rain?", "weather")),
)


def text_of(content: Mapping[str, Any]) -> str:
    """The text of an answer: of each choice, or of each call that it makes."""
    return "\n".join(text for choice in content["choices"] for text in _texts(choice))


def calls_of(content: Mapping[str, Any], choice: str) -> list[dict[str, Any]]:
    """Return the calls that a chat's answer makes.

    Args:
        content: the answer.
        choice: the name of the tool that was asked for; ``required``: any of them.

    Raises:
        AssertionError: when there is no call, or one of another tool.

    """
    names = NAMES if choice == "required" else {choice}
    calls = [call for c in content["choices"] for call in c["message"].get("tool_calls", [])]
    assert calls and {call["function"]["name"] for call in calls} <= names, content
    return calls


def _texts(choice: Mapping[str, Any]) -> list[str]:
    if "message" not in choice:
        return [choice["text"]]
    return [call["function"]["arguments"] for call in choice["message"].get("tool_calls", [])]
