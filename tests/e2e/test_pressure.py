# SPDX-License-Identifier: Apache-2.0
"""``eviction=pressure``: nothing goes while there is room; then what the reference says."""

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
    tiny_llama,
    token_ids,
)
from tests.e2e.oracle import Oracle

PROMPTS = [CHARACTERS[n : n + 40] for n in range(12)]
PRESSURE = {"eviction": "pressure"}
SETTINGS: dict[str, Any] = {"max_model_len": 256, "block_size": 16}


def test_room_for_all_gives_stock_s_tokens(tmp_path: Path) -> None:
    """Twelve sequences of 8 pages in just as many: nothing is evicted."""
    model = tiny_llama(tmp_path, 4, 4)
    settings = {"max_model_len": 256, "block_size": 32, "num_gpu_blocks_override": 12 * 8 + 1}
    with engine(model, **settings) as llm:
        stock = generate(llm, PROMPTS, max_tokens=200, logprobs=2)
    with engine(model, "h2o", {"budget": 64, **PRESSURE}, **settings) as llm:
        probe = Probe(llm)
        ours = generate(llm, PROMPTS, max_tokens=200, logprobs=2)
        assert probe.scheduler.ledger.stats.evicted_tokens == 0
        assert probe.num_preemptions == 0
    assert assert_same_tokens(stock, ours) <= 1


@pytest.mark.parametrize("pages", [48, 72])
def test_a_tight_pool_runs_as_many_as_always(pages: int, tmp_path: Path) -> None:
    """A pool for three or four whole sequences runs twelve at a quarter: none is thrown out.

    In the smaller one all reach their budgets in one step, and stop growing: nothing is packed.
    """
    model = tiny_llama(tmp_path, 4, 4)
    outputs, evicted = {}, {}
    for eviction in ("prompt_end", "pressure"):
        options = {"budget": 64, "eviction": eviction}
        with engine(model, "h2o", options, num_gpu_blocks_override=1 + pages, **SETTINGS) as llm:
            probe = Probe(llm)
            outputs[eviction] = token_ids(generate(llm, PROMPTS, max_tokens=200))
            assert max(len(step) for step in probe.held) == 12
            assert probe.num_preemptions == 0
            assert probe.num_free == probe.num_total
            stats = probe.scheduler.ledger.stats
            evicted[eviction] = stats.evicted_tokens
    assert (stats.pressure_packs > 0) == (stats.pressure_evicted_tokens > 0) == (pages == 72)
    assert (evicted["pressure"] < evicted["prompt_end"]) == (pages == 72)
    if pages == 48:
        assert outputs["pressure"] == outputs["prompt_end"]
    assert list(map(len, outputs["pressure"])) == [200] * 12


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("h2o", {}),
        ("h2o", {"kernels": "torch"}),
        ("h2o", {"recent_ratio": 0.25, "num_sink_tokens": 3, "score": "mean"}),
        ("h2o", {"evict_every": "page", "recent_ratio": 0.1, "budget": 80}),
        ("snapkv", {"observation_window": 20}),
        ("h2o2", {"observation_window": 20, "merge": 0.2}),
        ("h2o", {"kv_cache_dtype": "fp8"}),
        ("streaming", {}),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_what_a_pack_keeps(
    policy: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed in the middle of its text, a request keeps what the reference keeps, and goes on."""
    model = tiny_llama(tmp_path, 6, 2)
    options = {"budget": 48, **PRESSURE, **options}
    prompts = [CHARACTERS[n : n + 15 + 9 * n] for n in range(12)]
    settings = {**SETTINGS, "num_gpu_blocks_override": 61, "max_num_batched_tokens": 64}
    settings |= {k: options.pop(k) for k in ("kv_cache_dtype",) if k in options}
    with monkeypatch.context() as patch, engine(model, policy, options, **settings) as llm:
        probe = Probe(llm)
        oracle = Oracle(probe.scheduler).install(patch)
        generate(llm, prompts, max_tokens=90)
        assert probe.num_free == probe.num_total
        stats = probe.scheduler.ledger.stats
    assert oracle.num_packs == 4 * stats.pressure_packs >= 4 * 5
    assert oracle.num_victims > 0 or options.get("evict_every")
    assert (oracle.num_merged > 0) is oracle.scheduler.policy_config.merges
    assert oracle.num_ties <= oracle.num_victims / 1000
    assert oracle.max_error < 1e-4
