# SPDX-License-Identifier: Apache-2.0
"""Positions that roll: texts longer than the model was trained on, followed by the reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.v1.request import Request, RequestStatus

from benchmarks.quality.llama import Llama
from benchmarks.throughput.models import write_random
from research.rolling import Reader, rotated_back
from tests.e2e.harness import (
    CHARACTERS,
    Probe,
    assert_same_tokens,
    engine,
    generate,
    tiny_llama,
    tiny_opt,
    token_ids,
)
from tests.e2e.oracle import Oracle
from tests.e2e.zoo import GPT, small
from vllm_h2o.kernels.reference import Head, Rolling
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.policy import Eviction, policies

LENGTHS = (5, 33, 90, 300)
"""Prompts shorter and longer than the model was trained on."""
LIMIT = 96
ROLLING = {"positions": LIMIT, "eviction": "chunk", "budget": 32}
SETTINGS = {"block_size": 16, "max_num_batched_tokens": 40, "max_model_len": 2048}


def watch_positions(llm: LLM) -> list[int]:
    """The largest position of each call of a rotary embedding from now on."""
    seen: list[int] = []
    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.get_model()
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.register_forward_pre_hook(lambda _, args: seen.append(int(args[0].max())))
    assert any(isinstance(module, RotaryEmbedding) for module in model.modules())
    return seen


def follow(
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    policy: str,
    options: dict[str, Any],
    max_error: float = 1e-4,
    prompts: list[list[int]] | None = None,
    max_ties: float = 1e-3,
    **settings: Any,
) -> tuple[Oracle, Probe]:
    """Generate 150 tokens for each prompt, compared after every step."""
    prompts = prompts or [CHARACTERS[n : n + n] for n in LENGTHS]
    options, settings = {**ROLLING, **options}, {**SETTINGS, **settings}
    with monkeypatch.context() as patch, engine(model, policy, options, **settings) as llm:
        probe, seen = Probe(llm), watch_positions(llm)
        oracle = Oracle(probe.scheduler).install(patch)
        generate(llm, prompts, max_tokens=150)
        assert probe.num_free == probe.num_total
    assert LIMIT - 5 < max(seen) < LIMIT
    assert oracle.num_victims > 0 or options.get("evict_every")
    assert oracle.num_ties <= max(max_ties * oracle.num_victims, 1)
    assert oracle.max_error < max_error
    return oracle, probe


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("h2o", {}),
        ("h2o", {"score": "mean_squares", "num_sink_tokens": 2}),
        ("h2o", {"score": "mean", "recent_ratio": 0.2}),
        ("h2o", {"evict_every": 9, "num_sink_tokens": 6}),
        ("h2o", {"evict_every": "page", "budget": 48}),
        ("snapkv", {"observation_window": 7}),
        ("streaming", {}),
        ("local", {}),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_every_step_is_the_references(
    policy: str,
    options: dict[str, Any],
    kernels: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outputs, what is retained, victims: in chunks longer than the limit, and past the prompt."""
    model = tiny_llama(tmp_path, 6, 2)
    oracle, _ = follow(monkeypatch, model, policy, {"kernels": kernels, **options})
    # 2 layers of 2 KV heads; 300 + 150 tokens, at most 96 - 31 of them between two renumberings.
    assert oracle.num_renumbered >= 4 * (450 - LIMIT) // (LIMIT - 31)


def test_every_head_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without GQA; in 16 bits, where keys are rotated in float32 and stored rounded."""
    model = tiny_llama(tmp_path, 4, 4)
    follow(monkeypatch, model, "h2o", {}, max_error=2e-2, max_ties=1e-3, dtype="bfloat16")


def test_preempted_and_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is thrown out starts again from position 0, in chunks, and is renumbered again."""
    original, steps = Probe.__post_init__, itertools.count()

    def throws_out(probe: Probe) -> None:
        original(probe)
        schedule = probe.scheduler.schedule

        def reset_once(*args: Any, **kwargs: Any) -> Any:
            if next(steps) == 120:  # of three prompts more than LIMIT tokens are computed by now
                probe.num_preemptions += len(probe.scheduler.running)
                assert probe.scheduler.reset_prefix_cache(reset_running_requests=True)
            return schedule(*args, **kwargs)

        probe.scheduler.schedule = reset_once

    monkeypatch.setattr(Probe, "__post_init__", throws_out)
    model, few = tiny_llama(tmp_path, 6, 2), {"num_gpu_blocks_override": 13}
    oracle, probe = follow(monkeypatch, model, "h2o", {}, **few)
    assert probe.num_preemptions >= 3
    # More than without being thrown out: those who were are renumbered within their chunks.
    assert oracle.num_renumbered > 4 * (450 - LIMIT) // (LIMIT - 31) + 4


def say(llm: LLM, part: list[int], max_tokens: int) -> list[int]:
    """What a session answers to its next part."""
    core = llm.llm_engine.engine_core.engine_core
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    core.scheduler.add_request(Request("session", part, params, None, resumable=True))
    said: list[int] = []
    while core.scheduler.requests["session"].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        outputs, _ = core.step_fn()
        said += [token for o in outputs[0].outputs for token in o.new_token_ids] if outputs else []
    return said


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("policy", ["h2o", "streaming"])
def test_a_session_goes_on(
    policy: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of a streaming input follows what is resident: nothing is computed again."""
    model, options = tiny_llama(tmp_path, 6, 2), {**ROLLING, "kernels": kernels}
    with monkeypatch.context() as patch, engine(model, policy, options, **SETTINGS) as llm:
        probe, seen = Probe(llm), watch_positions(llm)
        oracle, length = Oracle(probe.scheduler).install(patch), 0
        for number, part in enumerate((90, 1, 7, 60, 150)):
            said = say(llm, CHARACTERS[number : number + part], 1 if number == 2 else 40)
            length += part + len(said) - 1
            assert probe.scheduler.ledger.states["session"].logical_len == length
        num_computed = sum(probe.num_scheduled)
        llm.llm_engine.engine_core.engine_core.abort_requests(["session"])
        assert probe.num_free == probe.num_total
    assert num_computed == length
    assert max(seen) < LIMIT and oracle.num_renumbered >= 4 * (length - LIMIT) // (LIMIT - 31)
    assert oracle.num_ties <= max(oracle.num_victims / 1000, 1)
    assert oracle.max_error < 1e-4


Config = Callable[[], hf.PretrainedConfig]
ROTARY: dict[str, Config] = {
    "plain": lambda: small(hf.LlamaConfig),
    "llama 3": lambda: small(
        hf.LlamaConfig,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "linear": lambda: small(
        hf.LlamaConfig,
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    ),
    "half of the head": lambda: small(
        hf.StableLmConfig,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "interleaved, half of the head": lambda: hf.GPTJConfig(**{**GPT, "rotary_dim": 16}),
}


@pytest.mark.parametrize("kind", ROTARY)
def test_a_window_is_the_same_at_any_position(kind: str, tmp_path: Path) -> None:
    """``local`` keeps the last tokens: renumbered or not, their distances are the same."""
    model = write_random(ROTARY[kind](), tmp_path)
    prompts = [CHARACTERS[n : n + n] for n in LENGTHS]
    own = {"eviction": "chunk", "budget": 32}
    with engine(model, "local", own, **{**SETTINGS, "max_model_len": 512}) as llm:
        original = generate(llm, prompts, max_tokens=200, logprobs=2)
    with engine(model, "local", ROLLING, **SETTINGS) as llm:
        seen = watch_positions(llm)
        rolled = generate(llm, prompts, max_tokens=200)
        assert max(seen) < LIMIT
    assert assert_same_tokens(original, rolled) <= 1


@torch.no_grad()
def simulated(
    model: Llama, prompt: list[int], num_tokens: int, chunk: int, head: Head
) -> list[int]:
    """What a Llama in plain torch says with references for its KV heads; ``head`` is their like."""
    reader, said = Reader(model, head), list[int]()
    for at in range(0, len(prompt), chunk):
        x = reader.step(prompt[at : at + chunk], at + chunk >= len(prompt))
    while len(said) < num_tokens:
        if said:
            x = reader.step(said[-1:])
        said.append(int(model.logits(x[0, -1]).argmax()))
    return said


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_the_whole_model_in_plain_torch(policy: str, tmp_path: Path) -> None:
    """Queries and keys of a model that knows nothing of vLLM, at the reference's positions."""
    folder, prompt = tiny_llama(tmp_path, 6, 2), CHARACTERS[:150]
    with engine(folder, policy, ROLLING, **SETTINGS) as llm:
        (tokens,) = token_ids(generate(llm, [prompt], max_tokens=150))
        budget = Probe(llm).scheduler.ledger.budget
    model = Llama(Path(folder))
    head = Head(
        Strip.empty(model.head_size, torch.float32),
        budget,
        policies()[policy].ranking,
        Eviction("chunk"),
        model.scale,
        rolling=Rolling(LIMIT, partial(rotated_back, model)),
    )
    assert simulated(model, prompt, 150, 40, head) == tokens


def test_sequences_of_four_million_tokens(tmp_path: Path) -> None:
    """As long as is asked for, of a model that knows 512 positions, and has a table of no more."""
    options = {"eviction": "chunk", "positions": "rolling", "budget": 64}
    settings = {**SETTINGS, "max_model_len": 4_194_304, "max_num_seqs": 1}
    with engine(tiny_llama(tmp_path, 4, 2), "streaming", options, **settings) as llm:
        seen = watch_positions(llm)
        (output,) = generate(llm, [(CHARACTERS * 2)[:1200]], max_tokens=100)
        assert llm.llm_engine.model_config.max_model_len == 4_194_304
    assert len(output.outputs[0].token_ids) == 100
    assert 500 < max(seen) < 512


def test_a_model_without_rotary_embeddings(tmp_path: Path) -> None:
    """OPT adds positions to the input: there is nothing that could be rotated."""
    with (
        pytest.raises(
            Exception,
            match=r"positions='rolling' is not supported: .* no rotary embedding next to its "
            r"attention\. .* added to the input cannot be rotated",
        ),
        engine(tiny_opt(tmp_path), "h2o", ROLLING, **SETTINGS),
    ):
        pass


def test_an_embedding_that_scales(tmp_path: Path) -> None:
    """YaRN's cosines carry a factor: named in the message."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 128}
    model = write_random(small(hf.LlamaConfig, rope_parameters=rope), tmp_path)
    with (
        pytest.raises(Exception, match=r"has YaRNScalingRotaryEmbedding\."),
        engine(model, "h2o", ROLLING, **SETTINGS),
    ):
        pass
