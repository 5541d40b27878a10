# SPDX-License-Identifier: Apache-2.0
"""Several tokens evicted at a time, in the engine: what stays is what the reference keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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

PROMPTS = [CHARACTERS[n : n + n] for n in (5, 31, 32, 33, 40, 90, 150)]
"""Shorter and longer than a budget of 32."""
SETTINGS: dict[str, Any] = {"block_size": 16, "max_num_batched_tokens": 64}


@pytest.fixture(autouse=True)
def _short_lifetime(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lifetime of `h2o2`'s window ends while these requests run."""
    shrink_terms(monkeypatch, lifetime=9)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("h2o", {"evict_every": 2}),
        ("h2o", {"evict_every": 16, "recent_ratio": 0.25, "num_sink_tokens": 3}),
        ("h2o", {"evict_every": 7, "kernels": "torch", "score": "mean", "recent_ratio": 0.0}),
        ("snapkv", {"evict_every": 5, "observation_window": 20}),
        ("snapkv", {"evict_every": 5, "enable_prefix_caching": True}),
        ("h2o", {"evict_every": 9, "eviction": "chunk", "num_sink_tokens": 7}),
        ("h2o", {"evict_every": 8, "budget": 0.5, "budget_basis": "prompt"}),
        ("h2o2", {"evict_every": 8, "observation_window": 12}),
        ("h2o", {"evict_every": "page", "budget": 64, "num_sink_tokens": 3}),
        ("h2o2", {"evict_every": "page", "budget": 64, "observation_window": 12}),
        ("h2o", {"evict_every": "page", "budget": 64, "eviction": "chunk", "score": "mean"}),
        ("snapkv", {"evict_every": "page", "budget": 64, "enable_prefix_caching": True}),
        ("streaming", {"evict_every": "page", "budget": 64, "kernels": "torch"}),
        ("streaming", {"evict_every": 16}),
        ("streaming", {"evict_every": 16, "enable_prefix_caching": True}),
        ("local", {"evict_every": 3}),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_retained_sets_equal_the_reference(
    policy: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every step, in every layer and KV head."""
    options = {"budget": 32, **options}
    settings = SETTINGS | {k: options.pop(k) for k in ("enable_prefix_caching",) if k in options}
    if policy in ("h2o2", "snapkv") or "enable_prefix_caching" in settings:
        settings["max_num_batched_tokens"] = 128
    model = tiny_llama(tmp_path, 6, 2)
    with monkeypatch.context() as patch, engine(model, policy, options, **settings) as llm:
        probe = Probe(llm)
        oracle = Oracle(probe.scheduler).install(patch)
        generate(llm, PROMPTS, max_tokens=60)
        if settings.get("enable_prefix_caching"):
            generate(llm, PROMPTS, max_tokens=60)
        assert probe.num_free == probe.num_total
        stats = probe.scheduler.ledger.stats
        assert stats.evicted_tokens > 0 and stats.pressure_packs == 0
    assert oracle.num_victims == 0
    assert oracle.num_together >= 4 * 2 * len(PROMPTS)
    assert oracle.max_error < 1e-4


def test_request_under_pressure_evicts_several_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that fell back to its budget evicts several at a time from then on."""
    model = tiny_llama(tmp_path, 6, 2)
    options = {"budget": 48, "eviction": "pressure", "evict_every": 6}
    prompts = [CHARACTERS[n : n + 15 + 9 * n] for n in range(12)]
    settings = {"max_model_len": 256, **SETTINGS, "num_gpu_blocks_override": 61}
    with monkeypatch.context() as patch, engine(model, "h2o", options, **settings) as llm:
        probe = Probe(llm)
        oracle = Oracle(probe.scheduler).install(patch)
        generate(llm, prompts, max_tokens=90)
        assert probe.num_free == probe.num_total
        stats = probe.scheduler.ledger.stats
    assert oracle.num_packs == 4 * stats.pressure_packs > 0
    assert oracle.num_together > 0


def test_a_full_budget_gives_stock_s_tokens(tmp_path: Path) -> None:
    """Nothing is evicted, however many at a time it would be."""
    model = tiny_llama(tmp_path, 4, 4)
    with engine(model) as llm:
        stock = generate(llm, PROMPTS, max_tokens=60, logprobs=2)
    with engine(model, "h2o", {"budget": 1.0, "evict_every": 8}) as llm:
        probe = Probe(llm)
        ours = generate(llm, PROMPTS, max_tokens=60)
        assert probe.scheduler.ledger.stats.evicted_tokens == 0
    assert assert_same_tokens(stock, ours) <= 1


def test_a_small_pool_preempts(tmp_path: Path) -> None:
    """Sequences are thrown out, begin again and end; no page is lost."""
    model = tiny_llama(tmp_path, 4, 2)
    settings = {"max_model_len": 128, "block_size": 16, "num_gpu_blocks_override": 14}
    prompts = [CHARACTERS[n : n + 20 + n] for n in range(6)]
    with engine(model, "h2o", {"budget": 32, "evict_every": 20}, **settings) as llm:
        probe = Probe(llm)
        outputs = token_ids(generate(llm, prompts, max_tokens=80))
        assert probe.num_preemptions > 0
        assert probe.num_free == probe.num_total
        assert max(held for step in probe.held for held in step.values()) == 4
    assert list(map(len, outputs)) == [80] * 6
