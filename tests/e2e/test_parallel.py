"""Ranks and stages give the tokens of one process, past the budget."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import RequestOutput

from tests.e2e.harness import TEXT, Probe, engine, generate, tiny_llama, token_ids

CHARACTERS = [ord(c) % 256 for c in TEXT]
PROMPTS = [CHARACTERS[n : n + n] for n in (5, 31, 33, 60, 90)]
"""Shorter and longer than the budget."""
SETTINGS: dict[str, Any] = {"block_size": 16, "max_model_len": 256, "max_num_batched_tokens": 64}
OPTIONS = {"budget": 32}
MAX_TOKENS = 16
FIRST, LAST = (f(os.sched_getaffinity(0)) for f in (min, max))
SAMPLING = {"logprobs": 1}
# On a CPU vLLM makes the buffers between two stages while it warms up, which it skips when eager.
TRACED = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers, so that each of two stages has one, with two KV heads."""
    return tiny_llama(tmp_path_factory.mktemp("model"), 4, 2)


def run(model: str, policy: str, **kwargs: Any) -> list[RequestOutput]:
    """The outputs of one engine."""
    with engine(model, policy, OPTIONS, **{**SETTINGS, **kwargs}) as llm:
        return generate(llm, PROMPTS, MAX_TOKENS, **SAMPLING)


@pytest.fixture(scope="module")
def alone(model: str) -> dict[str, list[RequestOutput]]:
    """By policy, what one process generates."""
    return {policy: run(model, policy) for policy in ("h2o", "random")}


@pytest.fixture
def two_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A core for each: on one NUMA node vLLM asks for that."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{FIRST}|{LAST}")
    yield monkeypatch


def assert_same(expected: list[RequestOutput], outputs: list[RequestOutput]) -> None:
    """The same tokens, as likely but for the order of sums."""
    assert token_ids(outputs) == token_ids(expected)
    for theirs, mine in zip(expected, outputs, strict=True):
        chances = ([*output.outputs[0].logprobs] for output in (theirs, mine))
        for token, a, b in zip(mine.outputs[0].token_ids, *chances, strict=True):
            assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-3)


def test_the_policies_differ(alone: dict[str, list[RequestOutput]]) -> None:
    """Otherwise the budget would not bind, and equality would say nothing."""
    assert token_ids(alone["h2o"]) != token_ids(alone["random"])


def test_tensor_parallel(
    model: str, alone: dict[str, list[RequestOutput]], two_workers: pytest.MonkeyPatch
) -> None:
    """A KV head each; ``random`` draws by the head's index in the whole model."""
    assert_same(alone["random"], run(model, "random", tensor_parallel_size=2))


def test_more_ranks_than_heads(tmp_path: Path, two_workers: pytest.MonkeyPatch) -> None:
    """One KV head for two ranks: both draw the same, with the engine in its own process."""
    model = tiny_llama(tmp_path, 4, 1)
    expected = run(model, "random")
    two_workers.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    two_workers.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    assert_same(expected, run(model, "random", tensor_parallel_size=2))


def test_pipeline_parallel(
    model: str, alone: dict[str, list[RequestOutput]], two_workers: pytest.MonkeyPatch
) -> None:
    """A layer each and two batches in flight; every page is back at the end."""
    settings = {**SETTINGS, **TRACED, "pipeline_parallel_size": 2}
    with engine(model, "h2o", OPTIONS, **settings) as llm:
        probe, core = Probe(llm), llm.llm_engine.engine_core.engine_core
        assert core.batch_queue_size == 2
        outputs = generate(llm, PROMPTS, MAX_TOKENS, **SAMPLING)
        assert probe.num_free == probe.num_total
        assert max(held for step in probe.held[-10:] for held in step.values()) <= 2
    assert_same(alone["h2o"], outputs)
