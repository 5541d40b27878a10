# SPDX-License-Identifier: Apache-2.0
"""Have one server read prompts and another generate: ``python examples/two_servers.py``.

Both are started with the same model and options, and with ``continuation`` in the same folder. The
first one computes a prompt, evicts from it, samples a token and leaves the cache in the folder. The
second one goes on from there, so its answer is that of one server. See docs/disaggregated.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

COMPLETIONS = "/v1/completions"
TIMEOUT = httpx.Timeout(None)
DEFAULT_TOKENS = 16
"""Of an answer whose request does not say how long it may be."""


def make_app(prefill: str, decode: str) -> FastAPI:
    """Serve completions of one prompt by two servers.

    Args:
        prefill: address of the server that reads prompts.
        decode: address of the server that generates.

    """
    app, client = FastAPI(), httpx.AsyncClient(timeout=TIMEOUT)

    @app.post(COMPLETIONS)
    async def complete(request: Request) -> Response:
        asked = await request.json()
        own = {"max_tokens": 1, "stream": False, "stream_options": None, "return_token_ids": True}
        own["vllm_xargs"] = {**(asked.get("vllm_xargs") or {}), "kv_save": 1}
        said = await client.post(prefill + COMPLETIONS, json=asked | own)
        if said.is_error:
            return Response(said.content, said.status_code, media_type="application/json")
        first = said.json()
        choice = first["choices"][0]
        num_left = (asked.get("max_tokens") or DEFAULT_TOKENS) - 1
        text = [*choice.pop("prompt_token_ids"), *choice.pop("token_ids")]
        rest = asked | {"prompt": text, "max_tokens": num_left}
        is_over = choice["finish_reason"] == "stop" or num_left == 0
        if asked.get("stream"):
            return StreamingResponse(stream(first, None if is_over else rest), media_type=EVENTS)
        if is_over:
            return Response(json.dumps(first), media_type="application/json")
        answer = await client.post(decode + COMPLETIONS, json=rest)
        if answer.is_error:
            return Response(answer.content, answer.status_code, media_type="application/json")
        return Response(json.dumps(joined(first, answer.json())), media_type="application/json")

    async def stream(first: dict[str, Any], rest: dict[str, Any] | None) -> AsyncIterator[bytes]:
        if rest:
            first["choices"][0]["finish_reason"] = None
        yield f"data: {json.dumps(first | {'usage': None})}\n\n".encode()
        if rest is None:
            yield b"data: [DONE]\n\n"
            return
        async with client.stream("POST", decode + COMPLETIONS, json=rest) as answer:
            async for part in answer.aiter_raw():
                yield part

    return app


EVENTS = "text/event-stream"


def joined(first: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """Join a first token and what follows it to one answer, with the usage of one request."""
    rest["choices"][0]["text"] = first["choices"][0]["text"] + rest["choices"][0]["text"]
    num_prompt, num_rest = first["usage"]["prompt_tokens"], rest["usage"]["completion_tokens"]
    rest["usage"] |= {"prompt_tokens": num_prompt, "completion_tokens": 1 + num_rest}
    return rest


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", default="http://localhost:8100", help="reads prompts")
    parser.add_argument("--decode", default="http://localhost:8200", help="generates")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    app = make_app(arguments.prefill, arguments.decode)
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
