# SPDX-License-Identifier: Apache-2.0
"""One engine begins an answer and another ends it, by ``kv_transfer_params``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, RequestOutput, SamplingParams
from vllm.inputs import TokensPrompt

from tests.e2e.conversations import own_text, starts
from tests.e2e.harness import engine, generate, tiny_llama, token_ids
from vllm_h2o.options.request import RefusedRequestError
from vllm_h2o.scheduler.handoff import HandsOver

PROMPT, SHORT = own_text(1, 120), own_text(2, 20)
NUM_TOKENS = 24
SEND = {"kv_transfer_params": {"do_remote_decode": True}}
CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 64}
"""Prompts are computed in two chunks."""
WHAT: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("h2o", {}, CHUNKED),
    ("h2o2", {"observation_window": 4}, {**CHUNKED, "dtype": "bfloat16"}),
    ("h2o2", {"score": "reconstruction"}, {}),
    ("snapkv", {"observation_window": 6}, {**CHUNKED, "enable_prefix_caching": True}),
    ("h2o", {"eviction": "chunk"}, {**CHUNKED, "async_scheduling": False}),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model."""
    return tiny_llama(tmp_path_factory.mktemp("handoff"), 4, 2)


def begin(llm: LLM, prompt: list[int] = PROMPT, max_tokens: int = 1, **more: Any) -> RequestOutput:
    """What the first engine answers, to be handed over."""
    (output,) = generate(llm, [prompt], max_tokens, extra_args=SEND, **more)
    return output


def end(
    llm: LLM, params: Any, prompt: list[int] = PROMPT, num_tokens: int = NUM_TOKENS, **more: Any
) -> RequestOutput:
    """What the second engine answers."""
    given = {"kv_transfer_params": params}
    (output,) = generate(llm, [prompt], num_tokens, extra_args=given, **more)
    return output


@pytest.fixture
def two(model: str, tmp_path: Path) -> Iterator[list[LLM]]:
    """Two engines with one folder."""
    with ExitStack() as stack:
        yield [stack.enter_context(starts(model, tmp_path, **CHUNKED)) for _ in range(2)]


@pytest.mark.parametrize(("policy", "options", "args"), WHAT, ids=[f"{p} {o}" for p, o, _ in WHAT])
def test_two_engines_answer_as_one(
    policy: str,
    options: dict[str, Any],
    args: dict[str, Any],
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Token for token, from prompts that are evicted and that are not; none is computed again."""
    monkeypatch.setattr("vllm_h2o.scheduler.conversations.FOUND_PER_STEP", 0)
    prompts, sent = (PROMPT, SHORT), []
    with starts(model, tmp_path, policy, options, **args) as llm:
        whole = [token_ids(generate(llm, [prompt], NUM_TOKENS))[0] for prompt in prompts]
        sent = [begin(llm, prompt) for prompt in prompts]
    with starts(model, tmp_path, policy, options, **args) as llm:
        for prompt, tokens, first in zip(prompts, whole, sent, strict=True):
            assert token_ids([first]) == [tokens[:1]]
            output = end(llm, first.kv_transfer_params, prompt)
            assert token_ids([output]) == [tokens]
            assert output.prompt_token_ids == prompt
            assert output.outputs[0].finish_reason == "length"
            assert output.num_cached_tokens == len(prompt)


def test_answer_has_as_many_tokens_as_it_may(two: list[LLM]) -> None:
    """All that the first engine gives, or none of its own after that."""
    one, other = two
    whole = token_ids(generate(one, [PROMPT], NUM_TOKENS))[0]
    for num_first in (1, 5):
        params = begin(one, max_tokens=num_first).kv_transfer_params
        for num_tokens in (1, 2, 5, 6):
            output = end(other, params, num_tokens=num_tokens)
            assert token_ids([output]) == [whole[:num_tokens]]
            assert output.outputs[0].finish_reason == "length"
    longest = own_text(5, 510)
    whole = token_ids(generate(one, [longest], 2))[0]
    params = begin(one, longest).kv_transfer_params
    assert token_ids([end(other, params, longest, 2)]) == [whole]
    params = begin(one, longest, 2).kv_transfer_params
    assert token_ids([end(other, params, longest, 2)]) == [whole]


def test_stop_of_the_first_engine_is_one_of_the_second(two: list[LLM]) -> None:
    """An answer that has ended is not handed over, and ends in the same way."""
    one, other = two
    stop = token_ids(generate(one, [PROMPT], 1))[0]
    first = begin(one, stop_token_ids=stop, max_tokens=4)
    assert first.kv_transfer_params is None
    output = end(other, None, stop_token_ids=stop)
    assert output.outputs[0].finish_reason == first.outputs[0].finish_reason == "stop"
    assert token_ids([output]) == token_ids([first])


def test_least_tokens_count_those_of_the_first_engine(two: list[LLM]) -> None:
    """A token that would end the answer ends it where it would in one engine."""
    one, other = two
    stops = token_ids(generate(one, [PROMPT], NUM_TOKENS))[0][1:]
    asked: dict[str, Any] = {"stop_token_ids": stops, "min_tokens": 4}
    whole = generate(one, [PROMPT], NUM_TOKENS, **asked)
    params = begin(one, stop_token_ids=stops, min_tokens=1).kv_transfer_params
    assert token_ids([end(other, params, **asked)]) == token_ids(whole)
    assert len(whole[0].outputs[0].token_ids) > 4


def test_lost_file_costs_time_alone(two: list[LLM], tmp_path: Path) -> None:
    """The prompt is computed with the first token; without it where another model gave that."""
    one, other = two
    params = begin(one).kv_transfer_params
    for path in tmp_path.glob("*.*"):
        path.unlink()
    tokens, anew = params["token_ids"], {"skip_reading_prefix_cache": True}
    rest = token_ids(generate(one, [[*PROMPT, *tokens]], NUM_TOKENS - 1, **anew))[0]
    output = end(other, params)
    assert token_ids([output]) == [[*tokens, *rest]]
    assert output.num_cached_tokens == 0
    output = end(other, {**params, "made_by": "another", "token_ids": [0]})
    assert token_ids([output]) == token_ids(generate(one, [PROMPT], NUM_TOKENS, **anew))


def test_what_two_engines_cannot_share_is_not_handed_over(two: list[LLM]) -> None:
    """The second engine computes the prompt, and refuses what the first did not give it."""
    one, other = two
    params = begin(one).kv_transfer_params
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"n": 2, "temperature": 1}, "the request has several answers"),
        ({"logprobs": 1}, "the request has log-probabilities"),
        ({"prompt_logprobs": 1}, "the request has log-probabilities"),
    )
    for asked, message in cases:
        assert begin(one, **asked).kv_transfer_params is None
        assert end(other, None, **asked).outputs
        with pytest.raises(RefusedRequestError, match=message):
            end(other, params, **asked)


def test_parameters_of_another_policy_are_refused(two: list[LLM], model: str) -> None:
    """By their first difference; and those that no server has made."""
    one, other = two
    params = begin(one).kv_transfer_params
    options = params["kv_policy"]
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"kv_policy": {**options, "budget": 48}}, "budget is 48 there and 64 here"),
        ({"kv_policy": {**options, "name": "h2o2"}}, "name is 'h2o2' there and 'h2o' here"),
        ({"kv_policy": None}, "the first server has no kv-policy"),
        ({"token_ids": []}, "are not those of an answer"),
        ({"token_ids": [-1]}, "are not those of an answer"),
        ({"token_ids": [True]}, "are not those of an answer"),
        ({"token_ids": 5}, "are not those of an answer"),
        ({"made_by": None}, "are not those of an answer"),
        ({"prompt": 120}, "are not those of an answer"),
        ({"token_ids": [256]}, "token 256 is none of the model's 256"),
    )
    for changed, message in cases:
        with pytest.raises(RefusedRequestError, match=message):
            end(other, {**params, **changed})
    with pytest.raises(RefusedRequestError, match="they are of another prompt"):
        end(other, params, [*PROMPT[:-1], PROMPT[-1] ^ 1])
    for key in ("kv_take", "kv_send"):
        with pytest.raises(RefusedRequestError, match=f"'{key}' in a request"):
            generate(other, [PROMPT], 1, extra_args={key: 1})
    with engine(model) as llm, pytest.raises(RefusedRequestError, match="this one has none"):
        end(llm, params)
    with engine(model, "h2o", {"budget": 64}) as llm:
        with pytest.raises(RefusedRequestError, match="the engine has no folder"):
            begin(llm)
        assert end(llm, {"do_remote_decode": False}).outputs


def test_aborted_request_leaves_nothing(two: list[LLM]) -> None:
    """Tokens of an answer that nobody waits for are forgotten."""
    one, other = two
    params = begin(one).kv_transfer_params
    inside, prompt = other.llm_engine, TokensPrompt(prompt_token_ids=PROMPT)
    sampling = SamplingParams(max_tokens=9, extra_args={"kv_transfer_params": params})
    request_id = inside.add_request("gone", prompt, sampling)
    scheduler = inside.engine_core.engine_core.scheduler
    assert isinstance(scheduler, HandsOver)
    assert list(scheduler._begun.values()) == [params["token_ids"]]
    inside.abort_request([request_id], internal=True)
    whole = token_ids(generate(one, [SHORT], 4))
    assert token_ids([end(other, begin(one, SHORT).kv_transfer_params, SHORT, 4)]) == whole
    assert scheduler._begun == {}
