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
from fastapi.responses import JSONResponse, StreamingResponse

ROUTES = ("/v1/completions", "/v1/chat/completions")
PARAMS = "kv_transfer_params"
ONE_TOKEN = {"max_tokens": 1, "stream": False, PARAMS: {"do_remote_decode": True}}


def refusal(message: str, status: int) -> Response:
    """An error as OpenAI's clients read it."""
    return JSONResponse({"error": {"message": message, "code": status}}, status)


def to_first(asked: dict[str, Any]) -> dict[str, Any]:
    """What the first server is asked: the same, but for one token."""
    rest = {k: v for k, v in asked.items() if k not in ("max_completion_tokens", "stream_options")}
    return rest | ONE_TOKEN | {"min_tokens": min(asked.get("min_tokens") or 0, 1)}


def make_app(prefill: str, decode: str) -> FastAPI:
    """Serve completions by two servers.

    Args:
        prefill: address of the server that reads prompts.
        decode: address of the server that generates.

    """
    app = FastAPI()
    client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))

    @app.exception_handler(httpx.HTTPError)
    async def unreachable(_: Request, error: httpx.HTTPError) -> Response:
        return refusal(f"a server cannot be reached: {error!r}", 502)

    async def complete(request: Request) -> Response:
        try:
            asked = await request.json()
        except json.JSONDecodeError:
            return refusal("the request is not JSON", 400)
        headers = {k: v for k, v in request.headers.items() if k.lower() == "authorization"}
        path = request.url.path
        first = await client.post(prefill + path, json=to_first(asked), headers=headers)
        if first.is_error:
            return passed(first)
        # Without parameters the second server computes the prompt itself.
        asked[PARAMS] = first.json().get(PARAMS)
        sent = client.build_request("POST", decode + path, json=asked, headers=headers)
        answer = await client.send(sent, stream=True)
        if asked.get("stream") and not answer.is_error:
            return StreamingResponse(parts_of(answer), media_type="text/event-stream")
        await answer.aread()
        return passed(answer)

    for route in ROUTES:
        app.post(route)(complete)
    return app


def passed(answer: httpx.Response) -> Response:
    """A server's answer as it is."""
    return Response(answer.content, answer.status_code, media_type="application/json")


async def parts_of(answer: httpx.Response) -> AsyncIterator[bytes]:
    """A server's answer as it comes; it is told when nobody listens any more."""
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()


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
