# SPDX-License-Identifier: Apache-2.0
"""The clients: requests of all kinds, well-formed or not, and canaries among them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp

from benchmarks.soak.adapters import STEADY, SWAPPED, VERSIONS
from benchmarks.soak.canaries import (
    CANARIES,
    COMPLETIONS,
    Budget,
    Canary,
    asking,
    prompt,
    text_of,
    tokens,
)
from benchmarks.soak.kinds import KINDS
from benchmarks.soak.server import Server

BUDGETS: tuple[Budget, ...] = (None, None, 0.1, 512, "full")
"""Values of ``kv_budget`` in requests; None: no such field."""
BAD_BUDGETS: tuple[dict[str, Budget], ...] = (
    {"kv_budget": 0},
    {"kv_budget": 1.5},
    {"kv_budget": "half"},
    {"kv-budget": 64},
)

WELL_FORMED = (
    "whole", "whole", "stream", "stream", "disconnect", "abort", "samples", "conversation",
)  # fmt: skip
TURNS = 3
"""Turns of a conversation."""
PATIENCE = 300
"""Seconds after which an answer is overdue."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a load.

    Args:
        seconds: it sends for so long,
        requests: or until so many have been sent, and enough canaries; 0 for no such end.
        clients: that send, one request after the other.
        max_model_len: tokens of the longest sequence.
        pages: of the pool.
        long_prompt: tokens of the longest prompts.
        burst: requests that are sent at once, now and then.
        least_requests: a run with fewer proves nothing.
        growth_mib: memory that a process may gain in a thousand requests.

    """

    seconds: float
    requests: int
    clients: int
    max_model_len: int
    pages: int
    long_prompt: int
    burst: int
    least_requests: int
    growth_mib: float


LEAST_CANARIES = 8 * len(CANARIES)
"""Before a load ends: those that are preempted are not compared."""


@dataclass(frozen=True)
class Mode:
    """A way to evict.

    Args:
        policy: options of the policy's server.
        engine: options of every server, stock vLLM's too.
        happens: a metric that is above 0 in the end; empty for none.
        repeats: canaries that are answered alike whatever else runs.
        greedy: all requests are.
        adapters: whether every request names an adapter, and one is loaded again in place.
        growth_mib: memory that a process of stock vLLM gains in a thousand such requests.

    """

    policy: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()
    happens: str = ""
    repeats: frozenset[str] = frozenset(canary.name for canary in CANARIES)
    greedy: bool = False
    adapters: bool = False
    growth_mib: float = 0.0


@dataclass
class Outcome:
    """The outcome of a load.

    Args:
        counts: (kind, what came of it) -> requests.
        surprises: what should not have come.
        canaries: of each request for one: its id, its name, and whether the answer was the same.
        memory: for each sample: requests so far, and the resident bytes of each process.
        seconds: it took.

    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    surprises: list[str] = field(default_factory=list)
    canaries: list[tuple[str, str, bool]] = field(default_factory=list)
    memory: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_requests(self) -> int:
        """All that were sent."""
        return sum(self.counts.values())


def malformed(max_model_len: int) -> list[tuple[bytes, int]]:
    """Bodies that vLLM refuses, and the status that it refuses them with."""
    bodies: list[tuple[dict[str, Any], int]] = [
        ({"prompt": "w5", "max_tokens": -1}, 400),
        ({"prompt": "w5", "max_tokens": "many"}, 400),
        ({"prompt": "w5", "max_tokens": max_model_len + 1}, 400),
        ({"prompt": [5] * (max_model_len + 1), "max_tokens": 1}, 400),
        ({"prompt": [10**9], "max_tokens": 1}, 400),
        ({"prompt": {"a": 1}, "max_tokens": 1}, 400),
        ({"prompt": "w5", "temperature": -2}, 400),
        ({"prompt": "w5", "n": 0}, 400),
        ({"prompt": "w5", "model": "another"}, 404),
        *(({"prompt": "w5", "vllm_xargs": xargs}, 400) for xargs in BAD_BUDGETS),
    ]
    return [
        (b"{not json", 400),
        (b"\x00\xff", 400),
        *((json.dumps(body).encode(), status) for body, status in bodies),
    ]


class Load:
    """Sends a load to a server.

    Args:
        server: that answers.
        shape: the sizes.
        greedy: whether nothing is sampled.
        adapters: folders of adapters, as ``write_adapters`` returns them; empty: none is used.
        seed: of all chance.

    """

    def __init__(
        self,
        server: Server,
        shape: Shape,
        greedy: bool = False,
        adapters: Mapping[str, str] | None = None,
        seed: int = 0,
    ) -> None:
        self.server, self.shape, self.url = server, shape, server.url
        self.adapters = adapters or {}
        self.model = STEADY if self.adapters else server.model
        self.temperatures = (0,) if greedy else (0, 0.8)
        self.well_formed = [kind for kind in WELL_FORMED if kind != "samples" or not greedy]
        self.chance = random.Random(seed)
        self.outcome = Outcome()
        self.expected: dict[str, str] = {}
        self._malformed = malformed(shape.max_model_len)

    async def run(self) -> Outcome:
        """Ask for each canary alone, then send everything until the shape's end."""
        timeout = aiohttp.ClientTimeout(total=PATIENCE)
        # A connection each: one that is used again may just be being closed by the server.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            self.session = session
            for canary in CANARIES:
                self.expected[canary.name] = await self._text(canary)
            for version in VERSIONS if self.adapters else ():
                self.expected[version] = await self._swapped(version)
            self.start = time.monotonic()
            clients = [self._client(number) for number in range(self.shape.clients)]
            always = (self._keep_asking(), self._bursts(), self._measure(), self._keep_swapping())
            await asyncio.gather(*clients, *always)
        self.outcome.seconds = time.monotonic() - self.start
        return self.outcome

    def _goes_on(self) -> bool:
        most, asked = self.shape.requests, len(self.outcome.canaries)
        return time.monotonic() - self.start < self.shape.seconds and (
            not most or self.outcome.num_requests < most or asked < LEAST_CANARIES
        )

    async def _client(self, number: int) -> None:
        """One request after another; the first clients begin with a kind each: all are sent."""
        kinds: dict[str, Callable[[], Awaitable[str]]] = {
            "whole": self._whole,
            "stream": self._stream,
            "disconnect": self._disconnect,
            "abort": self._abort,
            "samples": self._samples,
            "conversation": self._conversation,
            "malformed": self._refused,
            "long": self._long,
            **{kind: partial(ask, self) for kind, ask in KINDS.items()},
        }
        every = ["malformed", "long", *KINDS, *dict.fromkeys(self.well_formed)]
        for kind in every[number :: self.shape.clients]:
            await self._send(kind, kinds[kind])
        while self._goes_on():
            roll = self.chance.random()
            rare = "malformed" if roll < 0.15 else "long" if roll < 0.17 else None
            if roll > 0.85:
                rare = self.chance.choice(list(KINDS))
            kind = rare or self.chance.choice(self.well_formed)
            await self._send(kind, kinds[kind])

    async def _send(self, kind: str, request: Callable[[], Awaitable[str]]) -> None:
        try:
            result = await request()
        except (aiohttp.ClientError, asyncio.TimeoutError, AssertionError) as error:
            result = "failed"
            self.outcome.surprises.append(f"{kind}: {type(error).__name__}: {error}")
        self.outcome.counts[kind, result] += 1

    async def _bursts(self) -> None:
        """More at once than the pool holds, again and again.

        The first one surely: its requests begin with a page or two each and grow to the budget. A
        short load may have no other.
        """
        asked = partial(self._whole, prompt=prompt(self.chance, 40), max_tokens=180, vllm_xargs={})
        while self._goes_on():
            await asyncio.gather(*(self._send("burst", asked) for _ in range(self.shape.burst)))
            await asyncio.sleep(self.chance.uniform(1, 5))
            asked = partial(self._whole)

    async def _keep_asking(self) -> None:
        """All canaries at once, round after round."""
        for number in range(10**9):
            if not self._goes_on():
                return
            asks = [partial(self._ask, canary, number) for canary in CANARIES]
            await asyncio.gather(*(self._send("canary", ask) for ask in asks))
            await asyncio.sleep(0.2)

    async def _ask(self, canary: Canary, number: int) -> str:
        name = f"canary-{number}-{CANARIES.index(canary)}-"
        text = await self._text(canary, name)
        self.outcome.canaries.append((name, canary.name, text == self.expected[canary.name]))
        return "answered"

    async def _keep_swapping(self) -> None:
        """Load an adapter again in place, with other weights each time, and ask what it says."""
        for number in range(10**9 if self.adapters else 0):
            if not self._goes_on():
                return
            version = VERSIONS[number % len(VERSIONS)]
            await self._send("swapped", partial(self._ask_swapped, version, number))
            await asyncio.sleep(0.2)

    async def _ask_swapped(self, version: str, number: int) -> str:
        name = f"canary-{number}-{version.replace(' ', '-')}-"
        text = await self._swapped(version, name)
        self.outcome.canaries.append((name, version, text == self.expected[version]))
        return "answered"

    async def _swapped(self, version: str, request_id: str | None = None) -> str:
        where = {"lora_name": SWAPPED, "lora_path": self.adapters[version], "load_inplace": True}
        async with self.session.post(f"{self.url}/v1/load_lora_adapter", json=where) as answer:
            assert answer.status == 200, f"{answer.status} {await answer.text()}"
        return await self._text(CANARIES[1], request_id, model=SWAPPED)

    async def _measure(self) -> None:
        """Memory, twice a second."""
        processes = self.server.processes()
        while self._goes_on():
            rss = {role: process.memory_info().rss for role, process in processes.items()}
            self.outcome.memory.append((self.outcome.num_requests, rss))
            await asyncio.sleep(0.5)

    def random_body(self, **fixed: Any) -> dict[str, Any]:
        """A request of any length, with a priority and a budget of its own."""
        chance, longest = self.chance, self.shape.max_model_len
        prompt_len = chance.choice([1, 15, 16, 17, 40, 100, 130, longest // 8, longest // 5])
        body: dict[str, Any] = {
            "prompt": prompt(chance, prompt_len),
            "max_tokens": chance.choice([1, 2, 16, 33, 100, 180]),
            # Without a seed: on a CPU stock vLLM 0.32 dies of a seeded sample whose prompt is
            # computed in chunks (torch's generator there has no offset to set back).
            "temperature": chance.choice(self.temperatures),
            "priority": chance.randrange(3),
            "logprobs": chance.choice([None, 2]),
            "ignore_eos": True,
            "a field that nobody reads": 1,
        }
        return {**body, **asking(chance.choice(BUDGETS)), **fixed}

    def count(self, kind: str, number: int) -> None:
        """Count further requests of a kind that were answered."""
        self.outcome.counts[kind, "answered"] += number

    def _post(
        self, body: Mapping[str, Any], request_id: str | None = None, path: str = COMPLETIONS
    ) -> Any:
        headers = {"X-Request-Id": request_id} if request_id else {}
        whole = {"model": self.model, **body}
        return self.session.post(self.url + path, json=whole, headers=headers)

    async def answer(
        self, body: Mapping[str, Any], request_id: str | None = None, path: str = COMPLETIONS
    ) -> dict[str, Any]:
        """Return the answer, whose status is 200."""
        async with self._post(body, request_id, path) as answer:
            content: dict[str, Any] = await answer.json()
            assert answer.status == 200, f"{answer.status} {content}"
            return content

    async def _text(self, canary: Canary, request_id: str | None = None, **more: str) -> str:
        return text_of(await self.answer({**canary.body, **more}, request_id, canary.path))

    async def _whole(self, **fixed: Any) -> str:
        body = self.random_body(**fixed)
        usage = (await self.answer(body))["usage"]
        assert usage["prompt_tokens"] == len(body["prompt"]), usage
        assert usage["completion_tokens"] == body["max_tokens"], usage
        return "answered"

    async def _samples(self) -> str:
        content = await self.answer(self.random_body(n=3, temperature=0.8, max_tokens=30))
        assert len(content["choices"]) == 3, content
        return "answered"

    async def _conversation(self) -> str:
        """Each turn with all that was said, to the token: what the last one left may be there."""
        body = self.random_body(return_token_ids=True)
        for turn in range(TURNS):
            self.count("conversation", turn > 0)  # each is a request
            (choice,) = (await self.answer(body))["choices"]
            assert len(choice["token_ids"]) == body["max_tokens"], choice
            new = tokens(self.chance, self.chance.randrange(1, 40))
            body["prompt"] = [*body["prompt"], *choice["token_ids"], *new]
        return "answered"

    async def _long(self) -> str:
        long = prompt(self.chance, self.shape.long_prompt)
        await self.answer(self.random_body(prompt=long, max_tokens=20))
        return "answered"

    async def _stream(self) -> str:
        async with self._post(self.random_body(stream=True)) as answer:
            lines = [line async for line in answer.content if line.startswith(b"data: ")]
        assert len(lines) > 1 and lines[-1].strip() == b"data: [DONE]", lines[-2:]
        assert b'"finish_reason":"length"' in lines[-2], lines[-2]
        return "answered"

    async def _disconnect(self) -> str:
        left = self.chance.randrange(1, 20)
        async with self._post(self.random_body(stream=True, max_tokens=180)) as answer:
            async for line in answer.content:
                left -= line.startswith(b"data: ")
                if not left:
                    break
            answer.close()
        return "left"

    async def _abort(self) -> str:
        try:
            await asyncio.wait_for(self.answer(self.random_body()), self.chance.uniform(0, 1))
        except asyncio.TimeoutError:
            return "left"
        return "answered"

    async def _refused(self) -> str:
        data, status = self.chance.choice(self._malformed)
        url, headers = f"{self.server.url}/v1/completions", {"Content-Type": "application/json"}
        async with self.session.post(url, data=data, headers=headers) as answer:
            assert answer.status == status, f"{data[:80]!r}: {answer.status}, not {status}"
            assert "error" in await answer.json()
        return f"refused with {status}"
