# SPDX-License-Identifier: Apache-2.0
"""Kinds of requests that others report faults of: beams, torn sockets, tiny ones, tool calls."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from benchmarks.soak.canaries import CHAT, COMPLETIONS, asking, calling, calls_of, tokens

TINY = 12
"""Tiny requests, one right after the other."""
SMALL = 4
"""Requests with a small budget and the last priority, beside one that keeps everything."""


class Asks(Protocol):
    """A load, as its clients share it.

    Args:
        chance: all chance.
        model: the name that requests give.
        url: of the server.

    """

    chance: random.Random
    model: str
    url: str

    def random_body(self, **fixed: Any) -> dict[str, Any]:
        """A completion of any length."""
        ...

    async def answer(
        self, body: Mapping[str, Any], request_id: str | None = None, path: str = COMPLETIONS
    ) -> dict[str, Any]:
        """Return the answer, whose status is 200."""
        ...

    def count(self, kind: str, number: int) -> None:
        """Count further requests of a kind that were answered."""
        ...


async def beams(load: Asks) -> str:
    """A beam search: each beam and token is a request of its own to the engine."""
    width = load.chance.choice([2, 3])
    fixed = {"n": width, "use_beam_search": True, "max_tokens": load.chance.choice([1, 2, 8])}
    content = await load.answer(load.random_body(**fixed, temperature=0, logprobs=None))
    assert len(content["choices"]) == width, content
    return "answered"


async def tiny(load: Asks) -> str:
    """A token or two, and a token or two back."""
    for number in range(TINY):
        load.count("tiny", number > 0)
        body = load.random_body(
            prompt=tokens(load.chance, load.chance.choice([1, 2, 3])),
            max_tokens=load.chance.choice([1, 2]),
        )
        usage = (await load.answer(body))["usage"]
        assert usage["completion_tokens"] == body["max_tokens"], usage
    return "answered"


async def mixed(load: Asks) -> str:
    """One request that keeps everything, and grows, beside small ones that are past theirs."""
    whole = load.random_body(prompt=tokens(load.chance, 40), max_tokens=180, priority=0)
    small = [
        load.random_body(prompt=tokens(load.chance, 90), max_tokens=160, priority=2, **asking(64))
        for _ in range(SMALL)
    ]
    bodies = [{**whole, **asking("full")}, *small]
    for content, body in zip(await asyncio.gather(*map(load.answer, bodies)), bodies, strict=True):
        assert content["usage"]["completion_tokens"] == body["max_tokens"], content["usage"]
    load.count("mixed", SMALL)
    return "answered"


async def tools(load: Asks) -> str:
    """A chat with a tool call, and what the tool says in a second turn, with another call."""
    question = "".join(load.chance.choice("abcdefgh ") for _ in range(load.chance.randrange(80)))
    choice = load.chance.choice(["weather", "tide", "required"])
    body = {
        **calling(question, choice),
        "max_tokens": 400,
        "temperature": 0,
        "priority": load.chance.randrange(3),
    }
    calls = calls_of(await load.answer(body, path=CHAT), choice)
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    told = [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in calls]
    body["messages"] = [*body["messages"], said, *told]
    calls_of(await load.answer(body, path=CHAT), choice)
    load.count("tools", 1)
    return "answered"


async def torn(load: Asks) -> str:
    """A socket that is closed in the middle of a request, or of its answer, by FIN or RST."""
    fixed = {"model": load.model, "stream": True, "max_tokens": 180}
    body = json.dumps(load.random_body(**fixed)).encode()
    where = urlsplit(load.url)
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {where.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    whole = head.encode() + body
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        cut = load.chance.choice([len(whole), len(whole), load.chance.randrange(1, len(whole))])
        writer.write(whole[:cut])
        await writer.drain()
        if cut == len(whole):
            await asyncio.wait_for(reader.read(load.chance.randrange(1, 2000)), 60)
        await asyncio.sleep(load.chance.uniform(0, 0.3))
    finally:
        if load.chance.random() < 0.5:
            own = writer.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        writer.close()
    return "left"


KINDS: dict[str, Callable[[Asks], Awaitable[str]]] = {
    "beams": beams,
    "tiny": tiny,
    "mixed": mixed,
    "tools": tools,
    "torn": torn,
}
