# SPDX-License-Identifier: Apache-2.0
"""Full attention next to sliding windows: the policy on the one, vLLM's own attention on the other.

Windows of 32 tokens, so that prompts are shorter and longer than one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

from benchmarks.throughput.models import write_tokenizer
from tests.e2e.beside import KEPT, PROMPTS, SETTINGS, chances, follow, name, overwrite
from tests.e2e.harness import (
    CHARACTERS,
    FULL,
    SLIDING,
    Probe,
    assert_same_tokens,
    engine,
    generate,
    needs_float8_of_vllm,
    tiny_cohere2,
    tiny_gemma3,
    token_ids,
)
from tests.e2e.oracle import Oracle
from vllm_h2o.errors import UnsupportedError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.request import RefusedRequestError
from vllm_h2o.options.traits import bounds_hits
from vllm_h2o.planner.model import other_pages
from vllm_h2o.trace.record import run
from vllm_h2o.worker import rotary

NUM_WINDOW_PAGES = 4
"""Of a request in one group of windows, with a step of 64 tokens on its way."""


@pytest.mark.parametrize(("policy", "options"), KEPT, ids=name)
def test_what_is_kept(
    policy: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the layers with full attention, and in those alone, what the reference keeps."""
    if "kv_cache_dtype" in options:
        needs_float8_of_vllm()  # in layers that slide
    options = {"budget": 64, **options}
    settings = {k: options.pop(k) for k in ("kv_cache_dtype",) if k in options}
    oracle, _ = follow(monkeypatch, tiny_gemma3(tmp_path), policy, options, **settings)
    assert {layer for layer, _, _ in oracle.retained} == {
        f"model.layers.{index}.self_attn.attn" for index in (1, 4)
    }


def test_a_full_budget_gives_stock_s_tokens(tmp_path: Path) -> None:
    """As likely as there, too; a small budget gives others: otherwise nothing would be said."""
    model = tiny_gemma3(tmp_path)
    with engine(model, **SETTINGS) as llm:
        stock = generate(llm, PROMPTS, 40, logprobs=2)
    with engine(model, "h2o", {"budget": 32}, **SETTINGS) as llm:
        probe = Probe(llm)
        whole = generate(llm, PROMPTS, 40, logprobs=2, extra_args={"kv_budget": "full"})
        less = generate(llm, PROMPTS, 40, logprobs=2)
        assert probe.num_free == probe.num_total
    assert assert_same_tokens(stock, whole) == 0
    assert min(len(set(tokens)) for tokens in token_ids(stock)) >= 5
    assert chances(whole) == pytest.approx(chances(stock), abs=1e-4)
    assert token_ids(less) != token_ids(stock)


@pytest.mark.parametrize(("eviction", "pages"), [("always", 23), ("pressure", 48)])
def test_a_small_pool(
    eviction: str, pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are preempted, or fall back, and go on as the reference says."""
    pool = {"num_gpu_blocks_override": 1 + pages}
    options = {"budget": 64, "eviction": eviction}
    oracle, probe = follow(monkeypatch, tiny_gemma3(tmp_path), "h2o", options, 56, **pool)
    if eviction == "always":
        assert probe.num_preemptions > 0
    else:
        assert oracle.num_packs > 0


def test_a_pool_that_never_holds_a_request(tmp_path: Path) -> None:
    """Its windows count, too: it is refused, and runs with one token less."""
    prompt, full = CHARACTERS[:172], {"kv_budget": "full"}
    model, options = tiny_gemma3(tmp_path), {"budget": 32, "eviction": "chunk"}
    pool = {"num_gpu_blocks_override": 1 + 192 // 32 + 2 * NUM_WINDOW_PAGES}
    with engine(model, "h2o", options, **SETTINGS, **pool) as llm:
        config = llm.llm_engine.vllm_config
        assert other_pages(config, 192) == other_pages(config, 193) == 2 * NUM_WINDOW_PAGES
        with pytest.raises(RefusedRequestError, match="the request may need 15 pages"):
            generate(llm, [prompt], 21, extra_args=full)
        assert len(token_ids(generate(llm, [prompt], 20, extra_args=full))[0]) == 20


def test_abort_returns_pages_of_every_group(tmp_path: Path) -> None:
    """Within a prompt, and past it: pages of every group come back."""
    with engine(tiny_gemma3(tmp_path), "h2o", {"budget": 32}, **SETTINGS) as llm:
        probe = Probe(llm)
        sampling = SamplingParams(max_tokens=50, ignore_eos=True, detokenize=False)
        for n, prompt in enumerate(PROMPTS):
            llm.llm_engine.add_request(str(n), {"prompt_token_ids": prompt}, sampling)
        for _ in range(4):
            llm.llm_engine.step()
        assert probe.scheduler.other_groups.num_held() > 0
        states = probe.scheduler.ledger.states.values()
        assert {state.in_prompt for state in states} == {False, True}
        llm.llm_engine.abort_request([str(n) for n in range(len(PROMPTS))])
        llm.llm_engine.step()
        probe.scheduler.check_integrity()
        assert probe.num_free == probe.num_total


def test_pages_that_change_hands(tmp_path: Path) -> None:
    """Scores, read as K or V in 16 bits, may be no numbers: windows never see them."""
    settings = {**SETTINGS, "dtype": "bfloat16", "num_gpu_blocks_override": 60}
    with engine(tiny_gemma3(tmp_path), "h2o", {"budget": 64}, **settings) as llm:
        clean = generate(llm, PROMPTS, 20, logprobs=1)
        overwrite(llm, torch.nan)
        after = generate(llm, PROMPTS, 20, logprobs=1)
    assert token_ids(after) == token_ids(clean)
    assert chances(after) == chances(clean)


def test_the_default_command_line(tmp_path: Path) -> None:
    """A model and a policy are enough: prefix caching, on by default elsewhere, stays off."""
    model = tiny_gemma3(tmp_path)
    llm = LLM(model, kv_policy="h2o", skip_tokenizer_init=True, enforce_eager=True)
    try:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        assert scheduler.other_groups.windows == [32, 32]
        assert all(type(m) is SlidingWindowManager for m in scheduler.other_groups.managers)
        assert len(token_ids(generate(llm, PROMPTS, 5))) == len(PROMPTS)
    finally:
        llm.llm_engine.engine_core.shutdown()


PREFIX = CHARACTERS[:130]
SHARED = [PREFIX + CHARACTERS[n : n + n] for n in (40, 45, 50)]
WINDOW = {"observation_window": 20}


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("snapkv", WINDOW),
        ("snapkv", {**WINDOW, "evict_every": "page", "recent_ratio": 0.1}),
        ("streaming", {}),
    ],
    ids=name,
)
def test_shared_prefix_equals_a_cold_run(
    policy: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other they find the prefix in every group: tokens and sets of a cold run."""
    model = tiny_gemma3(tmp_path)
    options = {"budget": 128 if "evict_every" in options else 64, **options}
    if not bounds_hits(None):
        with pytest.raises(UnsupportedError, match=r"prefix caching"):
            engine(model, policy, options, enable_prefix_caching=True, **SETTINGS).__enter__()
        return
    with engine(model, policy, options, **SETTINGS) as llm:
        cold = [generate(llm, [prompt], 30, seed=3) for prompt in SHARED]
    settings = {**SETTINGS, "enable_prefix_caching": True}
    with monkeypatch.context() as patch, engine(model, policy, options, **settings) as llm:
        probe = Probe(llm)
        oracle = Oracle(probe.scheduler).install(patch)
        found = []
        for n in (0, 0, 1, 2, 2):
            output = generate(llm, [SHARED[n]], 30, seed=3)
            assert token_ids(output) == token_ids(cold[n])
            found.append(output[0].num_cached_tokens or 0)
        # A window is kept where a prompt's own scores begin, and where one was seen to branch off.
        assert found[0] == 0 < min(found[1], *found[3:]), found
        assert probe.num_free == probe.num_total
    assert oracle.num_victims > 0 or options.get("evict_every")
    assert oracle.max_error < 1e-4


def test_trace_beside_windows_has_the_full_layers(tmp_path: Path) -> None:
    """Of an engine with room for one sequence in every group; of layers with full attention."""
    write_tokenizer(tmp_path, 256)
    trace = run(
        tiny_gemma3(tmp_path),
        " ".join(f"w{n}" for n in range(3, 103)),
        KVPolicyConfig(budget=64),
        max_tokens=8,
        every=1,
        temperature=0.0,
        max_model_len=None,
        block_size=32,
        dtype="float32",
    )
    assert trace.layers == [1, 4]
    assert [frame.position.shape for frame in trace.frames] == [(2, 2, 63), *[(2, 2, 64)] * 7]


def test_full_attention_without_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cohere 2 rotates where it slides alone: there is no second pass, and that is said."""
    said: list[str] = []
    monkeypatch.setattr(rotary.logger, "warning", lambda *args: said.append(args[0] % args[1:]))
    model = tiny_cohere2(tmp_path)
    follow(monkeypatch, model, "h2o2", {"budget": 64, "observation_window": 20})
    assert len(said) == 1 and "cohere2 may leave out next to windows" in said[0]


def test_more_than_one_group_of_full_attention(tmp_path: Path) -> None:
    """Where few layers slide, vLLM splits the others, which would keep tokens of their own."""
    kinds = [SLIDING, *[FULL] * 5]
    with pytest.raises(UnsupportedError, match="works on one group of layers with full attention"):
        engine(tiny_gemma3(tmp_path, layer_types=kinds), "h2o", **SETTINGS).__enter__()
