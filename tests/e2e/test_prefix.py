# SPDX-License-Identifier: Apache-2.0
"""Prefix caching together with eviction: a hit gives what a cold run gives, and harms nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.e2e.harness import (
    TEXT,
    Probe,
    engine,
    generate,
    smollm2,
    tiny_llama,
    token_ids,
)
from tests.e2e.oracle import Oracle
from tests.e2e.prefixes import SETTINGS, WINDOW, family, run
from vllm_h2o.errors import UnsupportedError


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("snapkv", WINDOW),
        (
            "snapkv",
            {
                **WINDOW,
                "evict_every": "page",
                "recent_ratio": 0.1,
                "budget": 80,
                "num_sink_tokens": 3,
            },
        ),
        ("snapkv", {**WINDOW, "merge": 0.2}),
        ("streaming", {"merge": 0.2}),
        ("h2o2", {**WINDOW, "score": "window"}),
    ],
    ids=["snapkv", "pages", "merging", "streaming", "h2o2"],
)
def test_a_hit_is_a_cold_run(
    policy: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cold, then found in the cache and followed by the reference, then in another order."""
    model, prompts = tiny_llama(tmp_path, 6, 2), family()
    small = 80 if "evict_every" in options else 48
    budgets = [None, small, "full", 0.5, 128] * 2
    options = {"budget": 64, **options}
    with engine(model, policy, options, **SETTINGS) as llm:
        cold, hits = run(llm, prompts, budgets)
        assert hits == 0
    settings = {**SETTINGS, "enable_prefix_caching": True}
    with engine(model, policy, options, **settings) as llm:
        probe = Probe(llm)
        tokens, hits = run(llm, prompts, budgets)
        assert hits >= 100
        assert tokens == cold
        with monkeypatch.context() as patch:
            oracle = Oracle(probe.scheduler).install(patch)
            tokens, hits = run(llm, prompts, budgets)
        assert hits >= 700
        assert tokens == cold
        # The other way round: whoever comes first leaves pages for other budgets.
        tokens, hits = run(llm, prompts[::-1], budgets[::-1])
        assert hits >= 700
        assert tokens == cold[::-1]
        assert probe.num_free == probe.num_total
        assert oracle.num_compared > 0
        assert oracle.max_error < 1e-4
        assert (oracle.num_merged > 0) is oracle.scheduler.policy_config.merges
        # Within its reach a term gives tokens one value, to which later queries add squares.
        per_tie = 100 if policy == "h2o2" else 500
        assert oracle.num_ties <= oracle.num_victims / per_tie


@pytest.mark.parametrize("merge", [0.0, 0.2])
def test_a_small_pool_of_shared_pages(merge: float, tmp_path: Path) -> None:
    """Cached pages are taken back, requests preempted and resumed: nothing is lost or mixed up.

    Nor is a mass: each token stands for whole ones, together for no more than there were.
    """
    model, prompts = tiny_llama(tmp_path, 4, 4), family() * 2
    budgets = [None, 48, "full", 0.5] * 5
    settings = {**SETTINGS, "enable_prefix_caching": True, "num_gpu_blocks_override": 30}
    options = {"budget": 64, **WINDOW, "merge": merge}
    with engine(model, "snapkv", options, **settings) as llm:
        probe = Probe(llm)
        llm.collective_rpc("start_recording", args=(1,))
        tokens, _ = run(llm, prompts, budgets)
        (frames,) = llm.collective_rpc("take_recording")
        assert probe.num_preemptions > 0
        assert probe.num_free == probe.num_total
    assert [len(part) for part in tokens] == [30] * 20
    largest = 0.0
    for frame in frames if merge else ():
        masses = np.frombuffer(frame["masses"], np.float32).reshape(8, -1)  # of layers and heads
        assert (masses >= 1).all() and (masses == masses.round()).all()
        assert (masses.sum(1) <= frame["logical_len"]).all()
        largest = max(largest, float(masses.max()))
    assert (largest > 1) is (merge > 0)


def test_smollm2_with_shared_prefix_equals_stock() -> None:
    """The real model: one long prompt, three questions; budget 100 % is stock vLLM's text."""
    model = smollm2()
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer(TEXT)["input_ids"][:224]
    asked = [tokenizer(q)["input_ids"] for q in (" In short,", " The licensor", " A contributor")]
    prompts = [text + question for question in asked]
    for budget in (1.0, 0.25):
        options = {"budget": budget}
        stock = (None, None) if budget == 1.0 else ("snapkv", options)
        with engine(model, *stock, block_size=32) as llm:
            cold = token_ids(generate(llm, prompts, 12))
        with engine(model, "snapkv", options, block_size=32, enable_prefix_caching=True) as llm:
            # All at once: none finds what another computes in the same step.
            assert token_ids(generate(llm, prompts, 12)) == cold
            assert llm.reset_prefix_cache()
            for n, prompt in enumerate(prompts):
                output = generate(llm, [prompt], 12)
                assert token_ids(output) == [cold[n]]
                assert (output[0].num_cached_tokens or 0) >= (160 if n else 0)


def test_sums_over_every_query_are_refused(tmp_path: Path) -> None:
    """A cached prefix is not computed again: what its queries gave would be missing."""
    with (
        pytest.raises(UnsupportedError, match="needs every query of the prompt"),
        engine(tiny_llama(tmp_path, 4, 4), "h2o", {"budget": 64}, enable_prefix_caching=True),
    ):
        pass
