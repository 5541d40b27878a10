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

COMPLETIONS = "/v1/completions"
EVENTS = "text/event-stream"
DONE = b"data: [DONE]\n\n"
DEFAULT_TOKENS = 16
"""Of an answer whose request does not say how long it may be."""
KNOWN = {
    *("model", "prompt", "max_tokens", "min_tokens", "stream", "user", "cache_salt", "vllm_xargs"),
    *("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos"),
}
"""Parameters that mean the same when two servers share an answer."""


def refusal(message: str, status: int = 400) -> Response:
    """An error as OpenAI's clients read it."""
    return JSONResponse({"error": {"message": message, "code": status}}, status)


def halves(asked: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the first server is asked, and the second one but for its prompt."""
    most = asked.get("max_tokens")
    num_left = (DEFAULT_TOKENS if most is None else most) - 1
    least = asked.get("min_tokens") or 0
    extra = {**(asked.get("vllm_xargs") or {}), "kv_save": 1}
    own = {"max_tokens": 1, "stream": False, "return_token_ids": True, "vllm_xargs": extra}
    first = asked | own | {"min_tokens": min(least, 1)}
    return first, asked | {"max_tokens": num_left, "min_tokens": max(least - 1, 0)}


def joined(first: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """Join a first token and what follows it to one answer, with the usage of one request."""
    rest["choices"][0]["text"] = first["choices"][0]["text"] + rest["choices"][0]["text"]
    num_prompt, num_rest = first["usage"]["prompt_tokens"], rest["usage"]["completion_tokens"]
    rest["usage"] |= {"prompt_tokens": num_prompt, "completion_tokens": 1 + num_rest}
    return rest


def make_app(prefill: str, decode: str) -> FastAPI:
    """Serve completions of one prompt by two servers.

    Args:
        prefill: address of the server that reads prompts.
        decode: address of the server that generates.

    """
    app = FastAPI()
    client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))

    @app.exception_handler(httpx.HTTPError)
    async def unreachable(_: Request, error: httpx.HTTPError) -> Response:
        return refusal(f"a server cannot be reached: {error!r}", 502)

    @app.post(COMPLETIONS)
    async def complete(request: Request) -> Response:
        try:
            asked = await request.json()
        except json.JSONDecodeError:
            return refusal("the request is not JSON")
        if unknown := asked.keys() - KNOWN:
            return refusal(f"this proxy does not know {', '.join(sorted(unknown))}")
        headers = {k: v for k, v in request.headers.items() if k.lower() == "authorization"}
        to_first, to_second = halves(asked)
        said = await client.post(prefill + COMPLETIONS, json=to_first, headers=headers)
        if said.is_error:
            return Response(said.content, said.status_code, media_type="application/json")
        first = said.json()
        if len(first["choices"]) > 1:
            return refusal("this proxy takes one prompt, and gives one answer")
        choice = first["choices"][0]
        to_second["prompt"] = [*choice.pop("prompt_token_ids"), *choice.pop("token_ids")]
        goes_on = choice["finish_reason"] == "length" and to_second["max_tokens"] > 0
        if asked.get("stream"):
            rest = stream(to_second, headers) if goes_on else None
            return StreamingResponse(beginning_with(first, rest), media_type=EVENTS)
        if not goes_on:
            return JSONResponse(first)
        answer = await client.post(decode + COMPLETIONS, json=to_second, headers=headers)
        if answer.is_error:
            return Response(answer.content, answer.status_code, media_type="application/json")
        return JSONResponse(joined(first, answer.json()))

    async def stream(body: dict[str, Any], headers: dict[str, str]) -> AsyncIterator[bytes]:
        url = decode + COMPLETIONS
        async with client.stream("POST", url, json=body, headers=headers) as answer:
            if answer.is_error:
                yield b"data: " + await answer.aread() + b"\n\n" + DONE
                return
            async for part in answer.aiter_raw():
                yield part

    return app


async def beginning_with(
    first: dict[str, Any], rest: AsyncIterator[bytes] | None
) -> AsyncIterator[bytes]:
    """Send an answer's first token, then what follows."""
    if rest is not None:
        first["choices"][0]["finish_reason"] = None
    yield f"data: {json.dumps(first | {'usage': None})}\n\n".encode()
    if rest is None:
        yield DONE
        return
    async for part in rest:
        yield part


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
