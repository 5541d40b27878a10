# SPDX-License-Identifier: Apache-2.0
"""Ranks, stages and replicas give the tokens of one process, past the budget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import LLM, AsyncEngineArgs, RequestOutput, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from tests.e2e import ranks
from tests.e2e.beside import tiny_granite4
from tests.e2e.conversations import converse
from tests.e2e.harness import (
    CHARACTERS,
    Probe,
    arguments,
    assert_same_tokens,
    engine,
    generate,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_llama,
    token_ids,
)
from vllm_h2o.trace.record import Frame, record

PROMPTS = [CHARACTERS[n : n + n] for n in (5, 31, 33, 60, 90)]
"""Shorter and longer than the budget."""
SETTINGS: dict[str, Any] = {"block_size": 16, "max_model_len": 256, "max_num_batched_tokens": 64}
OPTIONS: dict[str, Any] = {"budget": 32}
PRESSED = {**OPTIONS, "eviction": "pressure"}
TIGHT = {**SETTINGS, "num_gpu_blocks_override": 17}
"""16 pages: the prompts whole, or one longest sequence."""
WINDOW = {**OPTIONS, "observation_window": 16}
MAX_TOKENS = 16
# On a CPU vLLM makes the buffers between two stages while it warms up, which it skips when eager.
TRACED = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}


@dataclass(frozen=True)
class Run:
    """What one engine gives.

    Args:
        outputs: of the prompts, all at once, with log-probabilities.
        frames: what was kept of the last prompt, alone, after each step.

    """

    outputs: list[RequestOutput]
    frames: list[Frame]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers, so that each of two stages has one, with two KV heads."""
    return tiny_llama(tmp_path_factory.mktemp("model"), 4, 2)


def measure(llm: LLM) -> Run:
    """What an engine gives that runs nothing else."""
    outputs = generate(llm, PROMPTS, MAX_TOKENS, logprobs=1)
    return Run(outputs, record(llm, PROMPTS[-1], 1, MAX_TOKENS)[2])


def run(model: str, policy: str, merge: float = 0.0, **kwargs: Any) -> Run:
    """An engine from its start to its end."""
    options = {**OPTIONS, "merge": merge}
    with engine(model, policy, options, **{**SETTINGS, **kwargs}) as llm:
        return measure(llm)


@pytest.fixture(scope="module")
def alone(model: str) -> dict[str, Run]:
    """By policy, what one process gives."""
    return {policy: run(model, policy) for policy in ("h2o", "streaming")}


@pytest.fixture
def two_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Which start soon."""
    ranks.install(monkeypatch)
    yield monkeypatch


@pytest.fixture
def two_ranks(two_workers: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Workers that do not compile what counts log-probabilities, for eight seconds each."""
    two_workers.setenv("TORCH_COMPILE_DISABLE", "1")
    return two_workers


def assert_same(expected: Run, mine: Run) -> None:
    """The same tokens, as likely, and the same tokens kept, but for the order of sums.

    Ranks add up their parts of a layer's output, so that its successor computes with other last
    digits: scores as close as these could change places.
    """
    assert token_ids(mine.outputs) == token_ids(expected.outputs)
    for pair in zip(expected.outputs, mine.outputs, strict=True):
        chances = (output.outputs[0].logprobs for output in pair)
        for token, a, b in zip(pair[0].outputs[0].token_ids, *chances, strict=True):
            assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-3)
    assert len(mine.frames) == len(expected.frames) >= MAX_TOKENS
    for a, b in zip(expected.frames, mine.frames, strict=True):
        assert a.position.shape == b.position.shape
        assert (a.position == b.position).all()
        np.testing.assert_allclose(b.score, a.score, rtol=1e-4, atol=1e-5)
        assert np.array_equal(a.mass, b.mass)


def assert_found(llm: LLM, expected: list[list[int]], num_found: int) -> None:
    """Every prompt twice at once: one finds what the other has begun. Then all are found."""
    first, again = (generate(llm, PROMPTS * 2, MAX_TOKENS) for _ in range(2))
    assert token_ids(first) == token_ids(again) == expected * 2
    found = [output.num_cached_tokens for output in (*first, *again)]
    half = len(PROMPTS)
    assert sum(found[:half]) == 0 < sum(found[half : 2 * half])
    assert sum(found[2 * half :]) == 2 * num_found


def test_the_policies_differ(alone: dict[str, Run]) -> None:
    """Otherwise the budget would not bind, and equality would say nothing."""
    assert token_ids(alone["h2o"].outputs) != token_ids(alone["streaming"].outputs)


def test_ranks_equal_one_process(model: str, alone: dict[str, Run], two_ranks: Any) -> None:
    """A KV head each, and its own scores."""
    assert_same(alone["h2o"], run(model, "h2o", tensor_parallel_size=2))


def test_tensor_parallel_and_merging(
    model: str, alone: dict[str, Run], two_ranks: pytest.MonkeyPatch
) -> None:
    """And its own masses."""
    merging = run(model, "h2o", 0.3)
    assert token_ids(merging.outputs) != token_ids(alone["h2o"].outputs)
    masses = merging.frames[-1].mass
    assert masses is not None and masses.max() > 1
    assert_same(merging, run(model, "h2o", 0.3, tensor_parallel_size=2))


def test_ranks_with_float8(model: str, two_ranks: pytest.MonkeyPatch) -> None:
    """The same scales, and the same bytes moved."""
    settings = {"model": model, "policy": "h2o", "kv_cache_dtype": "fp8"}
    assert_same(run(**settings), run(**settings, tensor_parallel_size=2))


@pytest.mark.parametrize("tiny", [tiny_gemma3, tiny_gpt_oss, tiny_granite4])
def test_ranks_next_to_other_layers(
    tiny: Callable[[Path], str], tmp_path: Path, two_ranks: pytest.MonkeyPatch
) -> None:
    """A KV head each, its sinks, half of every state; windows and states are vLLM's own."""
    settings = {"model": tiny(tmp_path), "policy": "h2o", "block_size": 32}
    assert_same(run(**settings), run(**settings, tensor_parallel_size=2))


def roll(model: str, **kwargs: Any) -> list[RequestOutput]:
    """What an engine says whose positions are renumbered within prompts, and past them."""
    options = {**OPTIONS, "eviction": "chunk", "positions": 64}
    with engine(
        model, "h2o", options, **{**SETTINGS, "max_num_batched_tokens": 32, **kwargs}
    ) as llm:
        # One by one: what a chunk of a prompt has room for does not depend on others.
        return [generate(llm, [prompt], 60, logprobs=2)[0] for prompt in PROMPTS[2:]]


@pytest.fixture(scope="module")
def rolled(model: str) -> list[RequestOutput]:
    """What one process says."""
    return roll(model)


def test_ranks_whose_positions_roll(
    model: str, rolled: list[RequestOutput], two_ranks: pytest.MonkeyPatch
) -> None:
    """Each rotates the keys of its own heads."""
    assert assert_same_tokens(rolled, roll(model, tensor_parallel_size=2)) == 0


def test_stages_whose_positions_roll(
    model: str, rolled: list[RequestOutput], two_workers: pytest.MonkeyPatch
) -> None:
    """Each rotates the keys of its own layers, and both read the same positions."""
    assert assert_same_tokens(rolled, roll(model, **TRACED, pipeline_parallel_size=2)) == 0


def talk(model: str, **kwargs: Any) -> list[list[list[int]]]:
    """What an engine says in conversations that begin anew with none of their turns."""
    options = {**OPTIONS, "continuation": True}
    with engine(model, "h2o", options, **{**SETTINGS, **kwargs}) as llm:
        probe = Probe(llm)
        turns = converse(llm, [list(p) for p in PROMPTS], (9, 30), MAX_TOKENS)
        for before, turn in zip(turns, turns[1:], strict=False):
            ends = [len(output.prompt_token_ids or ()) + MAX_TOKENS - 1 for output in before]
            assert [output.num_cached_tokens for output in turn] == ends
        assert probe.num_free == probe.num_total
    return [token_ids(turn) for turn in turns]


@pytest.fixture(scope="module")
def said(model: str) -> list[list[list[int]]]:
    """What one process says."""
    return talk(model)


def test_ranks_that_go_on(
    model: str, said: list[list[list[int]]], two_ranks: pytest.MonkeyPatch
) -> None:
    """Each copies its own heads' tokens."""
    assert talk(model, tensor_parallel_size=2) == said


def test_stages_that_go_on(
    model: str, said: list[list[list[int]]], two_workers: pytest.MonkeyPatch
) -> None:
    """Each copies what its own layers hold, in the order of batches."""
    assert talk(model, **TRACED, pipeline_parallel_size=2) == said


ALONE = {"score": "reconstruction", "split": "none", "observation_window": 8}


@pytest.mark.parametrize(("policy", "more"), [("h2o", {"evict_every": 5}), ("h2o2", ALONE)])
def test_ranks_after_a_step(policy: str, more: dict[str, Any], model: str, two_ranks: Any) -> None:
    """All pack in the same steps, and reread together. Heads would share within a rank alone."""
    runs = []
    for size in (1, 2):
        settings = {**SETTINGS, "tensor_parallel_size": size}
        with engine(model, policy, {**OPTIONS, **more}, **settings) as llm:
            runs.append(measure(llm))
    assert_same(*runs)


def test_ranks_with_drafts(model: str, two_ranks: pytest.MonkeyPatch) -> None:
    """Each keeps the queries of its own heads until it is known which drafts were accepted."""
    options = {**OPTIONS, "evict_every": 6}
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    drafts = {"speculative_config": {**ngram, "prompt_lookup_max": 3}}
    with engine(model, "h2o", options, **SETTINGS) as llm:
        expected = token_ids(generate(llm, PROMPTS, 60))
    settings = {**SETTINGS, **drafts, "tensor_parallel_size": 2}
    with engine(model, "h2o", options, **settings) as llm:
        probe, accepted = Probe(llm), list[int]()
        ledger, settle = probe.scheduler.ledger, probe.scheduler.ledger.settle

        def noted(request_id: str, num_computed: int) -> None:
            settle(request_id, num_computed)
            accepted.append(ledger.states[request_id].num_unscored - 1)

        ledger.settle = noted
        assert token_ids(generate(llm, PROMPTS, 60)) == expected
        assert sum(accepted) >= 5 and accepted.count(0) >= 5
        assert probe.num_free == probe.num_total


def test_tensor_parallel_and_shared_prefixes(
    model: str, alone: dict[str, Run], two_ranks: pytest.MonkeyPatch
) -> None:
    """Without scores all whole pages of a prompt are found, but never its last token."""
    settings = {**SETTINGS, "enable_prefix_caching": True, "tensor_parallel_size": 2}
    with engine(model, "streaming", OPTIONS, **settings) as llm:
        assert_found(llm, token_ids(alone["streaming"].outputs), 16 + 32 + 48 + 80)
        assert_same(alone["streaming"], measure(llm))


def double_kv_head(model: str, folder: Path) -> str:
    """The same model with its one KV head twice, for half of the query heads each."""
    config = AutoConfig.from_pretrained(model)
    config.num_key_value_heads = 2
    twice = AutoModelForCausalLM.from_config(config).float()
    weights = AutoModelForCausalLM.from_pretrained(model).state_dict()
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            weights[name] = weight.repeat(2, 1)
    twice.load_state_dict(weights)
    twice.save_pretrained(folder)
    return str(folder)


def test_more_ranks_than_heads(tmp_path: Path, two_ranks: pytest.MonkeyPatch) -> None:
    """Each of two ranks has the one KV head, and keeps what its own query heads attend to."""
    model = tiny_llama(tmp_path / "one", 4, 1)
    expected = run(double_kv_head(model, tmp_path / "two"), "h2o")
    assert token_ids(run(model, "h2o").outputs) != token_ids(expected.outputs)
    found = run(model, "h2o", tensor_parallel_size=2)
    assert token_ids(found.outputs) == token_ids(expected.outputs)
    assert {frame.position.shape[1] for frame in found.frames} == {1}


def test_stages_equal_one_process(
    model: str, alone: dict[str, Run], two_workers: pytest.MonkeyPatch
) -> None:
    """A layer each and two batches in flight; every page is back at the end."""
    with engine(model, "h2o", OPTIONS, **SETTINGS, **TRACED, pipeline_parallel_size=2) as llm:
        probe, core = Probe(llm), llm.llm_engine.engine_core.engine_core
        assert core.batch_queue_size == 2
        outputs = generate(llm, PROMPTS, MAX_TOKENS)
        assert probe.num_free == probe.num_total
        assert max(held for step in probe.held[-10:] for held in step.values()) <= 2
    assert token_ids(outputs) == token_ids(alone["h2o"].outputs)


def test_pipeline_parallel_and_shared_prefixes(model: str, two_workers: pytest.MonkeyPatch) -> None:
    """Of a batch that is still in flight, too: each stage computes batches in their order."""
    with engine(model, "snapkv", WINDOW, **SETTINGS) as llm:
        expected = token_ids(generate(llm, PROMPTS, MAX_TOKENS))
    settings = {**SETTINGS, **TRACED, "pipeline_parallel_size": 2, "enable_prefix_caching": True}
    with engine(model, "snapkv", WINDOW, **settings) as llm:
        probe = Probe(llm)
        assert_found(llm, expected, 16 + 32 + 64)
        assert probe.num_free == probe.num_total


def test_stages_next_to_sliding_windows(tmp_path: Path, two_workers: pytest.MonkeyPatch) -> None:
    """One layer of full attention each."""
    model, settings = tiny_gemma3(tmp_path), {**SETTINGS, "block_size": 32}
    with engine(model, "h2o", OPTIONS, **settings) as llm:
        expected = token_ids(generate(llm, PROMPTS, MAX_TOKENS))
    with engine(model, "h2o", OPTIONS, **settings, **TRACED, pipeline_parallel_size=2) as llm:
        probe = Probe(llm)
        assert token_ids(generate(llm, PROMPTS, MAX_TOKENS)) == expected
        assert probe.num_free == probe.num_total


def under_pressure(model: str, **settings: Any) -> list[list[int]]:
    """The tokens of requests of which some fall back; every page is back at the end."""
    with engine(model, "h2o", PRESSED, **TIGHT, **settings) as llm:
        probe, outputs = Probe(llm), generate(llm, PROMPTS, MAX_TOKENS)
        assert probe.num_free == probe.num_total
        assert probe.num_preemptions == 0
        assert probe.scheduler.ledger.stats.pressure_packs > 0
    return token_ids(outputs)


def test_ranks_under_pressure(model: str, two_ranks: pytest.MonkeyPatch) -> None:
    """All pack the same requests in the same steps."""
    assert under_pressure(model, tensor_parallel_size=2) == under_pressure(model)


def test_stages_under_pressure(model: str, two_workers: pytest.MonkeyPatch) -> None:
    """With two batches in flight a pack comes when its request's turn does."""
    outputs = under_pressure(model, pipeline_parallel_size=2, **TRACED)
    assert list(map(len, outputs)) == [MAX_TOKENS] * len(PROMPTS)


def shown(name: str, model: str, rank: int) -> float:
    """One of the policy's metrics, of one replica."""
    labels = {"model_name": model, "engine": str(rank)}
    value = REGISTRY.get_sample_value(f"vllm:kv_policy_{name}", labels)
    assert value is not None
    return value


async def replicas(model: str, asked: list[tuple[int, int]]) -> list[list[int]]:
    """What two replicas generate for (prompt, replica)."""
    settings = arguments(model, "h2o", OPTIONS, **SETTINGS, data_parallel_size=2)
    # Else each has a worker process as well, which takes as long to start again.
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings, distributed_executor_backend="uni"))
    sampling = SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False
    )

    async def one(prompt: int, rank: int) -> list[int]:
        given = {"prompt_token_ids": PROMPTS[prompt]}
        request_id, tokens = f"{prompt} for {rank}", list[int]()
        async for output in llm.generate(given, sampling, request_id, data_parallel_rank=rank):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    try:
        return list(await asyncio.gather(*(one(*each) for each in asked)))
    finally:
        llm.shutdown()


def test_replicas_equal_one_process(
    model: str, alone: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas in processes of their own; all prompts for one, two of them for the other."""
    # vLLM 0.33 gives each replica a NUMA node of its own, unless this is set to anything.
    monkeypatch.setenv("VLLM_CPU_SIM_MULTI_NUMA", "0")
    ranks.fork(monkeypatch)
    asked = [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (3, 1), (4, 1)]
    expected = token_ids(alone["h2o"].outputs)
    assert asyncio.run(replicas(model, asked)) == [expected[prompt] for prompt, _ in asked]
    for rank, prompts in enumerate((PROMPTS, PROMPTS[3:])):
        lengths = [len(prompt) for prompt in prompts]
        evicted = [max(length + MAX_TOKENS - 1 - OPTIONS["budget"], 0) for length in lengths]
        assert shown("evicted_tokens_total", model, rank) == sum(evicted)
        assert shown("packs_total", model, rank) == sum(n >= OPTIONS["budget"] for n in lengths)
