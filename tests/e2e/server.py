# SPDX-License-Identifier: Apache-2.0
"""A ``vllm serve`` with a policy, started as examples/serve.md starts it, and its client."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.soak.server import ROOT, Server
from tests.e2e.forking import FORKING
from tests.e2e.harness import smollm2

ENGINE = ("--dtype=float32", "--enforce-eager", "--max-model-len=512", "--block-size=16")
LONGER = ("--dtype=float32", "--enforce-eager", "--max-model-len=1024", "--block-size=16")
EXAMPLE = ROOT / "examples/serve.md"
MODEL, URL = "facebook/opt-6.7b", "http://localhost:8000"
"""What stands for the model and the address in the example."""
TIMEOUT = 300
"""Seconds for one command."""


class Block(NamedTuple):
    """Code that a page shows."""

    language: str
    code: str


def blocks(page: Path) -> list[Block]:
    """What a page shows in code, from top to bottom."""
    text = page.read_text(encoding="utf-8")
    return [Block(*found) for found in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)]


def documented_flags() -> list[str]:
    """What the example starts the server with: 64 slots a sequence, with 512 tokens at most."""
    program, command, model, *flags = shlex.split(blocks(EXAMPLE)[0].code)
    assert (program, command, model) == ("vllm", "serve", MODEL)
    return flags


class Completing(Server):
    """A server that is asked for completions, and whose processes are forked."""

    vllm = FORKING

    @classmethod
    def documented(cls, log: Path) -> Completing:
        """The example's server, of a small model."""
        return cls(Path(smollm2()), log, [*ENGINE, *documented_flags()])

    def complete(self, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and answer of a completion request."""
        try:
            with urllib.request.urlopen(self.request(**body), timeout=120) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def request(self, **body: Any) -> urllib.request.Request:
        """A completion request, greedy unless told otherwise."""
        return asking(self.url, self.model, **body)

    def metric(self, name: str) -> float:
        """The value of a metric with one line."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(name)]
        (value,) = (float(line.split()[-1]) for line in lines)
        return value


def asking(url: str, model: str, **body: Any) -> urllib.request.Request:
    """A completion request to an address, greedy unless told otherwise."""
    return urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps({"model": model, "temperature": 0, **body}).encode(),
        headers={"Content-Type": "application/json"},
    )


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(block: Block, server: Completing) -> str:
    """What a block prints, with the server's own address and model."""
    code = block.code.replace(URL, server.url).replace(MODEL, server.model)
    command = {
        "bash": ["bash", "-o", "pipefail", "-c", code],
        "python": [sys.executable, "-c", code],
    }[block.language]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
