# SPDX-License-Identifier: Apache-2.0
"""One of the server's processes is killed while requests are on their way."""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.soak.server import Server

SECONDS_TO_END = 120
STREAMS = 4


@dataclass(frozen=True)
class Death:
    """A process's death, as clients and the operator see it.

    Args:
        streams: how each stream ended that was on its way, most tokens first.
        whole: what became of an answer that was on its way: a status, or an error's name.
        later: what becomes of requests afterwards, likewise.
        exit_code: of ``vllm serve``; None when it is still there.

    """

    streams: tuple[str, ...]
    whole: str
    later: str
    exit_code: int | None


@dataclass
class Witness:
    """A death, and every token that was served on the way to it.

    Args:
        death: how it went.
        served: the text of each stream until it ended.

    """

    death: Death
    served: list[str]


async def kill(server: Server, role: str, body: dict[str, Any]) -> Witness:
    """Kill the process of that role while ``body`` is being answered; see what follows.

    Args:
        server: that is running.
        role: a key of :meth:`Server.processes`.
        body: of a greedy completion that takes seconds.

    """
    url = f"{server.url}/v1/completions"
    body = {"model": server.model, "ignore_eos": True, **body}
    timeout = aiohttp.ClientTimeout(total=SECONDS_TO_END)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        served = [""] * STREAMS
        streams = [
            asyncio.create_task(_stream(session, url, body, served, number))
            for number in range(STREAMS)
        ]
        whole = asyncio.create_task(_status(session, url, body))
        while not all(served):
            await asyncio.sleep(0.01)
        server.processes()[role].kill()
        ends = tuple(sorted(await asyncio.gather(*streams)))
        answer = await whole
        exit_code = await asyncio.to_thread(_exit_code, server)
        later = await _status(session, url, body)
    return Witness(Death(ends, answer, later, exit_code), served)


def _exit_code(server: Server) -> int | None:
    try:
        return server.process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        return None


async def _status(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
    try:
        async with session.post(url, json=body) as answer:
            await answer.read()
            return str(answer.status)
    except aiohttp.ClientError as error:
        return type(error).__name__


async def _stream(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    served: list[str],
    number: int,
) -> str:
    """How a stream ended; its text goes to ``served[number]``."""
    try:
        async with session.post(url, json={**body, "stream": True}) as answer:
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return f"error {event['error']['code']}"
                served[number] += event["choices"][0]["text"]
            return "closed"
    except aiohttp.ClientError as error:
        return type(error).__name__
