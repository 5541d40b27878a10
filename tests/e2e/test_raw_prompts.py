# SPDX-License-Identifier: Apache-2.0
"""Prompts' pages in ExampleConnector's files: a loaded prefix gives what a cold run gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.e2e.harness import CHARACTERS, Probe, engine, generate, tiny_llama, token_ids
from tests.e2e.oracle import Oracle
from tests.e2e.prefixes import SETTINGS, WINDOW, family, run
from vllm_h2o.scheduler.raw_prompts import RawPrompts

WHOLE = {**SETTINGS, "enable_prefix_caching": True, "max_num_batched_tokens": 300}
"""A step has room for any prompt, so that each is stored."""
LONG = CHARACTERS[:150]


def connects(folder: Path) -> dict[str, Any]:
    """The connector of a folder."""
    where = {"shared_storage_path": str(folder)}
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": where,
    }


@contextmanager
def stores(
    folder: Path, policy: str | None = "snapkv", options: dict[str, Any] | None = None, **more: Any
) -> Iterator[LLM]:
    """An engine of the folder's model, that keeps prompts in the folder."""
    model = str(folder / "model")
    if policy and options is None:
        options = {"budget": 64, **WINDOW}
    settings = {**WHOLE, "kv_transfer_config": connects(folder / "kept"), **more}
    with engine(model, policy, options, **settings) as llm:
        yield llm


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model in it."""
    tiny_llama(tmp_path / "model", 6, 2)
    return tmp_path


@pytest.mark.parametrize(
    ("policy", "options", "more"),
    [
        ("snapkv", WINDOW, {}),
        ("snapkv", {**WINDOW, "merge": 0.2}, {"async_scheduling": True}),
        ("streaming", {"merge": 0.2}, {}),
        ("h2o2", {**WINDOW, "score": "window"}, {}),
        ("h2o2", {**WINDOW, "split": "heads"}, {"dtype": "bfloat16"}),
        ("snapkv", WINDOW, {"kv_cache_dtype": "fp8"}),
        ("snapkv", WINDOW, {"max_num_batched_tokens": 90}),
    ],
    ids=["snapkv", "merging", "streaming", "h2o2", "heads", "fp8", "chunks"],
)
def test_loaded_prefix_is_a_cold_run(
    policy: str,
    options: dict[str, Any],
    more: dict[str, Any],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second engine loads what the first stored, and keeps what the reference keeps."""
    prompts, budgets = family(), [None, 48, "full", 0.5, 128] * 2
    options = {"budget": 64, **options}
    with engine(str(folder / "model"), policy, options, **{**WHOLE, **more}) as llm:
        cold, _ = run(llm, prompts, budgets)
    numbers = []
    for is_second in (False, True):
        with stores(folder, policy, options, **more) as llm, monkeypatch.context() as patch:
            probe = Probe(llm)
            if is_second and not more:
                oracle = Oracle(probe.scheduler).install(patch)
            tokens, hits = run(llm, prompts, budgets)
            assert tokens == cold
            assert probe.num_free == probe.num_total
            numbers.append((hits, sum(probe.num_scheduled)))
    (hits, computed), (more_hits, fewer) = numbers
    assert more_hits - hits >= 150
    assert computed - fewer == more_hits - hits
    if not more:
        assert oracle.num_compared > 0
        assert oracle.max_error < 1e-4


def answer(llm: LLM, prompt: list[int] = LONG, **asked: Any) -> tuple[list[list[int]], int]:
    """The tokens of an answer, and how many of its prompt were not computed."""
    outputs = generate(llm, [prompt], 20, **asked)
    return token_ids(outputs), outputs[0].num_cached_tokens or 0


def test_full_budget_equals_stock(folder: Path) -> None:
    """Both use vLLM's connector and one folder, and neither loads what the other stored."""
    answers, found = [], []
    for policy in (None, "snapkv", "snapkv", None):
        options = {"budget": 1.0, **WINDOW} if policy else None
        with stores(folder, policy, options, block_size=32) as llm:
            tokens, cached = answer(llm)
        answers.append(tokens)
        found.append(cached)
    assert answers == answers[:1] * 4
    assert found == [0, 0, 128, 128]


def test_pages_of_another_engine_or_salt_are_not_loaded(folder: Path) -> None:
    """A policy, its options and a salt are parts of the files' names."""
    salted = {"prompt_token_ids": LONG, "cache_salt": "mine"}
    params = SamplingParams(temperature=0, max_tokens=2, detokenize=False)
    with stores(folder) as llm:
        assert answer(llm)[1] == 0
        assert llm.generate([salted], params, use_tqdm=False)[0].num_cached_tokens == 0
    with stores(folder) as llm:
        assert llm.generate([salted], params, use_tqdm=False)[0].num_cached_tokens == 128
        other = {**salted, "cache_salt": "yours"}
        assert llm.generate([other], params, use_tqdm=False)[0].num_cached_tokens == 0
        assert answer(llm)[1] == 128
    with stores(folder, "streaming", {"budget": 64}) as llm:
        assert answer(llm)[1] == 0
    with stores(folder, "snapkv", {"budget": 64, "observation_window": 6}) as llm:
        assert answer(llm)[1] == 0


def test_files_that_are_cut_or_gone_are_computed_and_stored_again(folder: Path) -> None:
    """A folder of which a layer is missing holds nothing."""
    with stores(folder) as llm:
        cold = answer(llm)[0]
    first, _ = files = sorted((folder / "kept").rglob("*.safetensors"))
    for spoil in (first.unlink, lambda: first.write_bytes(first.read_bytes()[:-1])):
        spoil()
        for cached in (0, 128):
            with stores(folder) as llm:
                assert answer(llm) == (cold, cached)
    assert files == sorted((folder / "kept").rglob("*.safetensors"))


@pytest.mark.parametrize(
    "renew",
    [LLM.reset_prefix_cache, lambda llm: llm.collective_rpc("reload_weights")],
    ids=["reset", "weights"],
)
def test_reset_and_new_weights_end_loads_and_stores(
    renew: Callable[[LLM], object], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights may be others after either."""
    with stores(folder) as llm:
        answer(llm)
        assert isinstance(Probe(llm).scheduler.connector, RawPrompts)
        llm.collective_rpc("check_health")
        assert "neither stored nor loaded" not in caplog.text
        renew(llm)
        llm.reset_prefix_cache()
        assert caplog.text.count("neither stored nor loaded") == 1
        assert answer(llm)[1] == 0
        answer(llm, CHARACTERS[300:400])
    assert len([*(folder / "kept").iterdir()]) == 1


def test_small_pool_preempts_requests_that_loaded(folder: Path) -> None:
    """A preempted request is computed anew: nothing is lost or mixed up."""
    prompts, budgets = family() * 2, [None, 48, "full", 0.5] * 5
    found = []
    for _ in range(2):
        with stores(folder, num_gpu_blocks_override=30) as llm:
            probe = Probe(llm)
            tokens, hits = run(llm, prompts, budgets)
            assert probe.num_preemptions > 0
            assert probe.num_free == probe.num_total
            assert [len(part) for part in tokens] == [30] * 20
        found.append(hits)
    assert found[1] - found[0] >= 150
