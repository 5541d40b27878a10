# SPDX-License-Identifier: Apache-2.0
"""One server reads prompts and another generates, by the commands of docs/disaggregated.md."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import smollm2
from tests.e2e.server import LONGER, MODEL, Completing, asking, blocks, free_port
from tests.house_rules import ROOT

READ, GENERATE, PROXY, ASK = blocks(ROOT / "docs/disaggregated.md")
PORTS = ("8100", "8200", "8000")
TEXT = (ROOT / "examples" / "lamp_room.txt").read_text(encoding="utf-8")
NUM_TOKENS = 24
KV_BYTES = 30 * 3 * 64 * 2 * 4
"""Of one token in the small model: layers, KV heads, elements of K and of V in float32."""


def flags_of(code: str, folder: Path) -> list[str]:
    """What a server of the page is started with, but for its port."""
    _, _, model, port, number, *flags = shlex.split(code.replace("/dev/shm/kept", str(folder)))
    assert (model, port) == (MODEL, "--port") and number in PORTS
    return [*flags, *LONGER]


@contextmanager
def proxy(*servers: Completing) -> Iterator[str]:
    """Run the page's proxy; its address."""
    port = free_port()
    code = PROXY.code
    for number, server in zip(PORTS, servers, strict=False):
        code = code.replace(f"http://localhost:{number}", server.url)
    _, *command = shlex.split(code.replace(PORTS[2], str(port)))
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=os.environ)
    try:
        yield f"http://localhost:{port}"
    finally:
        process.terminate()
        process.wait()


def post(url: str, route: str = "completions", **body: Any) -> tuple[int, bytes]:
    """Status and answer of a request to the proxy."""
    request = asking(url, MODEL, **body)
    request.full_url = f"{url}/v1/{route}"
    for _ in range(100):
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except urllib.error.URLError:
            time.sleep(0.2)  # the proxy starts
    raise TimeoutError(url)


def streamed(answer: bytes) -> str:
    """The text of a stream of events."""
    events = [line.removeprefix(b"data: ") for line in answer.split(b"\n") if line]
    assert events.pop() == b"[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def said(message: bytes) -> str:
    """The text of a chat's answer."""
    return str(json.loads(message)["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the servers keep caches, and logs."""
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[Completing]]:
    """The page's two servers, of a small model with the page's name."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Completing(
                    Path(smollm2()),
                    folder / f"{index}.log",
                    [*flags_of(block.code, folder / "kept"), f"--served-model-name={MODEL}"],
                )
            )
            for index, block in enumerate((READ, GENERATE))
        ]


def test_two_servers_answer_as_one(servers: list[Completing], folder: Path) -> None:
    """Evicted or not, streamed or not; the second computes no token of a prompt."""
    one, two = servers
    with proxy(one, two) as url:
        code = ASK.code.replace(f"http://localhost:{PORTS[2]}", url)
        asked = {"max_tokens": NUM_TOKENS}
        begun = 0
        for prompt in ("The lamp room was", TEXT):
            _, whole = post(one.url, prompt=prompt, **asked)
            answer = json.loads(whole)
            status, parts = post(url, prompt=prompt, **asked)
            assert status == 200
            found, text = json.loads(parts), answer["choices"][0]["text"]
            assert found["choices"][0]["text"] == text
            assert found["choices"][0]["finish_reason"] == "length"
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert found["usage"][name] == answer["usage"][name]
            _, events = post(url, prompt=prompt, stream=True, **asked)
            assert streamed(events) == text
            begun += 2 * answer["usage"]["prompt_tokens"]
            assert two.metric("vllm:kv_policy_continuation_folder_hits_total") == begun
        assert begun > 1000
        sizes = sorted(path.stat().st_size for path in (folder / "kept").iterdir())
        whole_bytes = KV_BYTES * 1024  # of as many tokens as the budget is a fifth of
        assert len(sizes) == 2 and 0.19 < sizes[1] / whole_bytes < 0.22
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["usage"]["completion_tokens"] == 32


def test_two_servers_answer_what_one_does(servers: list[Completing]) -> None:
    """A chat, several answers, log-probabilities, a grammar and errors."""
    one, two = servers
    message = [{"role": "user", "content": "What is a lamp?"}]
    chat: dict[str, Any] = {"route": "chat/completions", "messages": message, "max_tokens": 12}
    choice = {"structured_outputs": {"choice": ["lantern", "lamp"]}}
    hits = "vllm:kv_policy_continuation_folder_hits_total"
    with proxy(one, two) as url:
        before = two.metric(hits)
        assert said(post(url, **chat)[1]) == said(post(one.url, **chat)[1])
        assert (begun := two.metric(hits)) > before
        for asked in ({"logprobs": True}, choice):
            assert said(post(url, **chat, **asked)[1]) == said(post(one.url, **chat, **asked)[1])
        asked = {"prompt": "The lamp room was", "max_tokens": 9}
        several = json.loads(post(url, **asked, n=2, temperature=1)[1])
        assert len(several["choices"]) == 2
        assert two.metric(hits) == begun
        least = json.loads(post(url, **asked, min_tokens=9)[1])
        assert least["usage"]["completion_tokens"] == 9
        assert two.metric(hits) > begun
        status, refused = post(url, **{**asked, "prompt": ["The lamp", "The door"]})
        assert status == 400 and b"they are of another prompt" in refused
        status, refused = post(url, **{**asked, "temperature": -1})
        assert status == 400 and b"temperature" in refused
    _, begun_there = post(one.url, **asked, kv_transfer_params={"do_remote_decode": True})
    params = json.loads(begun_there)["kv_transfer_params"]
    params["kv_policy"]["budget"] = 0.3
    status, refused = post(two.url, **asked, kv_transfer_params=params)
    assert status == 400 and b"budget is 0.3 there and 0.2 here" in refused
