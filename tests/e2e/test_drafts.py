# SPDX-License-Identifier: Apache-2.0
"""Drafts by n-grams: the tokens and the retained sets of the same requests without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.e2e.harness import (
    CHARACTERS,
    Probe,
    assert_same_tokens,
    engine,
    generate,
    shrink_terms,
    tiny_llama,
    token_ids,
)
from tests.e2e.oracle import Oracle

PROMPTS = [
    [7, 8, 9, 10] * 10,
    [3],
    CHARACTERS[:31],
    [5, 6] * 16,
    CHARACTERS[40:73],
    [*CHARACTERS[:20], *CHARACTERS[:50], *CHARACTERS[:20]],
    CHARACTERS[:150],
]
"""Shorter and longer than a budget of 32; in some much comes again."""
DRAFTS: dict[str, Any] = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
}
SETTINGS: dict[str, Any] = {"block_size": 16, "max_num_batched_tokens": 128, "max_num_seqs": 8}
MAX_TOKENS = 90


def asserted(llm: LLM, oracle: Oracle | None = None) -> list[list[int]]:
    """The tokens; every page is back at the end."""
    probe = Probe(llm)
    outputs = token_ids(generate(llm, PROMPTS, max_tokens=MAX_TOKENS))
    assert probe.num_free == probe.num_total
    assert not probe.scheduler.ledger.states
    if oracle is not None:
        assert min(oracle.num_accepted, oracle.num_rejected, oracle.num_together) >= 20
        assert oracle.num_victims == 0
        assert oracle.max_error < 1e-4
    return outputs


@pytest.fixture(autouse=True)
def _short_lifetime(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lifetime of `h2o2`'s window ends while these requests run."""
    shrink_terms(monkeypatch, lifetime=9)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("h2o", {}),
        ("h2o", {"evict_every": 6, "kernels": "torch", "score": "mean", "num_sink_tokens": 3}),
        ("h2o", {"evict_every": 20, "score": "sum_squares"}),
        ("snapkv", {"observation_window": 20}),
        ("snapkv", {"observation_window": 20, "enable_prefix_caching": True}),
        # Alone, else the chunks of a prompt depend on how many drafts of others a step computes.
        ("h2o", {"eviction": "chunk", "num_sink_tokens": 7, "max_num_seqs": 1}),
        ("h2o", {"budget": 0.5, "budget_basis": "prompt"}),
        ("h2o", {"kv_cache_dtype": "fp8"}),
        # Prompts in one step, for that has room for fewer of their tokens next to drafts of others.
        (
            "h2o2",
            {"observation_window": 12, "max_num_batched_tokens": 512},
        ),
        ("streaming", {}),
        ("streaming", {"enable_prefix_caching": True}),
        ("h2o", {"evict_every": "page", "budget": 64}),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_as_without_drafts(
    policy: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are equal, and after every step each head holds what the reference holds.

    The reference computes token by token and sees accepted tokens alone.
    """
    options = {"budget": 32, "evict_every": 9, **options}
    others = (
        "enable_prefix_caching",
        "kv_cache_dtype",
        "max_num_seqs",
        "max_num_batched_tokens",
    )
    settings = SETTINGS | {k: options.pop(k) for k in others if k in options}
    model = tiny_llama(tmp_path, 6, 2)
    with engine(model, policy, options, **settings) as llm:
        alone = asserted(llm)
    with (
        monkeypatch.context() as patch,
        engine(model, policy, options, **settings, **DRAFTS) as llm,
    ):
        oracle = Oracle(llm.llm_engine.engine_core.engine_core.scheduler).install(patch)
        assert asserted(llm, oracle) == alone


def test_a_full_budget_gives_stock_s_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock vLLM without drafts; ours with, by `h2o` and by `full`, which needs no evict_every."""
    model = tiny_llama(tmp_path, 4, 4)
    with engine(model) as llm:
        stock = generate(llm, PROMPTS, max_tokens=MAX_TOKENS, logprobs=2)
    for policy, options in (("h2o", {"budget": 1.0, "evict_every": 6}), ("full", {})):
        with monkeypatch.context() as patch, engine(model, policy, options, **DRAFTS) as llm:
            probe = Probe(llm)
            oracle = Oracle(probe.scheduler).install(patch)
            ours = generate(llm, PROMPTS, max_tokens=MAX_TOKENS)
            assert probe.scheduler.ledger.stats.evicted_tokens == 0
        assert min(oracle.num_accepted, oracle.num_rejected) >= 20
        assert assert_same_tokens(stock, ours) <= 1


def test_preempted_and_aborted_with_drafts(tmp_path: Path) -> None:
    """Every page is back, the others end, and no worker keeps queries of those that are gone."""
    model = tiny_llama(tmp_path, 4, 2)
    settings = {"max_model_len": 128, "block_size": 16, "num_gpu_blocks_override": 16, **DRAFTS}
    with engine(model, "h2o", {"budget": 32, "evict_every": 20}, **settings) as llm:
        probe, core = Probe(llm), llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, detokenize=False)
        for i in range(8):
            core.add_request(f"r{i}", {"prompt_token_ids": [7, 8 + i] * (6 + 2 * i)}, sampling)
        ended, num_aborted = set(), 0
        while core.has_unfinished_requests():
            ended |= {output.request_id for output in core.step() if output.finished}
            states = probe.scheduler.ledger.states.items()
            drafted = [name for name, state in states if state.num_unscored]
            if num_aborted < 2 and len(probe.held) > 10 * (num_aborted + 1) and drafted:
                core.abort_request(drafted[:1], internal=True)
                num_aborted += 1
        assert (num_aborted, len(ended)) == (2, 6)
        assert probe.num_preemptions > 0
        assert probe.num_free == probe.num_total
        generate(llm, [[1, 2, 3]], max_tokens=2)  # a step that says who is gone
        assert not core.model_executor.driver_worker.worker._draft_queries
