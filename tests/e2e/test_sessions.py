# SPDX-License-Identifier: Apache-2.0
"""Sessions with a part that exceeds ``max_model_len``, and sessions that wait during a pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.request import Request

from tests.e2e.harness import CHARACTERS, Probe, arguments, engine, generate, token_ids
from vllm_h2o.scheduler.sessions import BoundsSessions

LONGEST = 128
SETTINGS = {
    "max_model_len": LONGEST,
    "block_size": 16,
    "num_gpu_blocks_override": 60,
    "max_num_batched_tokens": 64,
}
GREEDY = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("h2o", {"budget": 48}),
    ("streaming", {"budget": 48, "eviction": "chunk"}),
    ("h2o", {"budget": 48, "continuation": True}),
)


def push(llm: LLM, length: int, max_tokens: int = 10) -> None:
    """Send the next part of the session."""
    core = llm.llm_engine.engine_core.engine_core
    params = SamplingParams(**GREEDY, max_tokens=max_tokens)
    part = Request("session", CHARACTERS[:length], params, None, resumable=True)
    core.scheduler.add_request(part)


def answers(llm: LLM) -> list[tuple[int, Any, Any]]:
    """Tokens, reason and message of each part that ends, until there is nothing to do."""
    core = llm.llm_engine.engine_core.engine_core
    ended, num_tokens = list[tuple[int, Any, Any]](), 0
    while core.scheduler.has_requests():
        outputs, _ = core.step_fn()
        for output in outputs[0].outputs if outputs else ():
            num_tokens += len(output.new_token_ids)
            if output.finish_reason is not None:
                ended.append((num_tokens, output.finish_reason, output.stop_reason))
                num_tokens = 0
    return ended


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize(("policy", "options"), POLICIES)
def test_part_beyond_max_model_len_is_refused_and_the_session_goes_on(
    policy: str, options: dict[str, Any], queued: bool, model: str
) -> None:
    """To the last token that fits; whether it comes while another part is answered or later."""
    with engine(model, policy, options, **SETTINGS) as llm:
        probe, ended = Probe(llm), list[tuple[int, Any, Any]]()
        assert isinstance(probe.scheduler, BoundsSessions)
        # 70 + 10 tokens, of which the last is not computed; 79 + 49 is too long, and 79 + 48 fits.
        for length in (70, 49, 200, 48, 1, 100):
            push(llm, length)
            if not queued:
                ended += answers(llm)
        ended += answers(llm)
        reasons = [(num, str(reason)) for num, reason, _ in ended]
        whole, last = (10, "length"), (1, "length")
        refused = (0, "length")
        assert sorted(reasons) == sorted([whole, refused, refused, last, refused, refused])
        told = [message for *_, message in ended if message]
        assert told[0] == (
            "kv-policy: a part of 49 tokens is not supported: its session has 79 tokens already. "
            "max_model_len=128 includes one token of the answer. Begin another session, or give "
            "the server a larger --max-model-len."
        )
        assert "its session has 127 tokens already" in told[-1]
        assert [len(t) for t in token_ids(generate(llm, [CHARACTERS[:50]] * 2, 20))] == [20, 20]
        llm.llm_engine.engine_core.engine_core.abort_requests(["session"])
        assert probe.num_free == probe.num_total


async def converse(model: str) -> tuple[list[tuple[int, str, Any]], int]:
    """Parts of one session through the front end, and another request after them."""
    settings = arguments(model, "h2o", {"budget": 48}, **SETTINGS, kv_cache_memory_bytes=1 << 26)
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
    ready = asyncio.Semaphore(1)
    params = SamplingParams(**GREEDY, max_tokens=10, output_kind=RequestOutputKind.DELTA)

    async def parts() -> AsyncGenerator[StreamingInput, None]:
        for length in (70, 49, 48):
            await ready.acquire()
            yield StreamingInput(prompt={"prompt_token_ids": CHARACTERS[:length]})

    def plain() -> dict[str, Any]:
        return {"prompt_token_ids": CHARACTERS[:50]}

    try:
        ended, num_tokens = list[tuple[int, str, Any]](), 0
        async for output in llm.generate(parts(), params, request_id="session"):
            for each in output.outputs:
                num_tokens += len(each.token_ids)
                if each.finish_reason:
                    ended.append((num_tokens, each.finish_reason, each.stop_reason))
                    num_tokens = 0
                    ready.release()
        outputs = [o async for o in llm.generate(plain(), params, request_id="other")]
        return ended, sum(len(o.outputs[0].token_ids) for o in outputs)
    finally:
        llm.shutdown()


def test_part_beyond_max_model_len_over_the_front_end_is_an_error(model: str) -> None:
    """A client sees a part that ends without tokens, and the message."""
    ended, num_tokens = asyncio.run(converse(model))
    assert [each[:2] for each in ended] == [(10, "length"), (0, "length"), (1, "length")]
    assert "a part of 49 tokens is not supported" in ended[1][2]
    assert num_tokens == 10


def said(llm: LLM, lengths: Sequence[int], clears: bool) -> list[tuple[int, Any, Any]]:
    """Answers to parts, with a pause while the session waits for each later one."""
    core, ended = llm.llm_engine.engine_core.engine_core, list[tuple[int, Any, Any]]()
    for length in lengths:
        push(llm, length)
        ended += answers(llm)
        core.pause_scheduler(mode="keep", clear_cache=clears)
        core.resume_scheduler()
    return ended


@pytest.mark.parametrize(("policy", "options"), POLICIES)
@pytest.mark.parametrize("clears", [False, True])
def test_session_that_waits_during_a_pause_goes_on(
    policy: str, options: dict[str, Any], clears: bool, model: str
) -> None:
    """Also where the pause clears the cache."""
    with engine(model, policy, options, **SETTINGS) as llm:
        probe = Probe(llm)
        ended = said(llm, (40, 20, 7), clears)
        assert [(num, reason) for num, reason, _ in ended] == [(10, FinishReason.LENGTH)] * 3
        llm.llm_engine.engine_core.engine_core.abort_requests(["session"])
        assert probe.num_free == probe.num_total
