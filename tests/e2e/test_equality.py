# SPDX-License-Identifier: Apache-2.0
"""With a budget that does not bind, the tokens are stock vLLM's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.envs import use_aot_compile

from tests.e2e.harness import (
    CHARACTERS,
    TEXT,
    assert_same_tokens,
    mixed_prompts,
    opt_125m,
    run,
    smollm2,
    tiny_llama,
    token_ids,
)
from vllm_h2o.kernels.native import loader
from vllm_h2o.policy import policies


@pytest.mark.parametrize("chunk", [64, 4096])
def test_smollm2_budget_of_100_percent_equals_stock(chunk: int) -> None:
    """Prompts of mixed lengths, batched, with and without chunked prefill."""
    model = smollm2()
    tokens = AutoTokenizer.from_pretrained(model)(TEXT)["input_ids"]
    prompts = mixed_prompts(tokens, 7 if chunk == 64 else 16, longest=220)
    settings = {"max_num_batched_tokens": chunk, "max_model_len": 256}
    stock = run(model, prompts, None, **settings)
    share = run(model, prompts, "h2o", options={"budget": 1.0}, **settings)
    assert assert_same_tokens(stock, share) <= 1
    if chunk == 64:
        slots = run(model, prompts, "h2o", options={"budget": 245}, **settings)
        assert assert_same_tokens(stock, slots) <= 1


@pytest.mark.parametrize("chunk", [64, 4096])
def test_opt_of_the_real_shape_equals_stock(chunk: int, tmp_path: Path) -> None:
    """OPT-125M's shape, random weights: learned positions, ReLU, every head its own K and V."""
    model = opt_125m(tmp_path)
    prompts = mixed_prompts([17 * ord(c) for c in TEXT], 7 if chunk == 64 else 16, longest=100)
    settings = {"max_num_batched_tokens": chunk, "max_model_len": 128}
    stock = run(model, prompts, None, **settings)
    ours = run(model, prompts, "h2o", options={"budget": 1.0}, **settings)
    assert assert_same_tokens(stock, ours) <= 1


@pytest.mark.parametrize(
    ("policy", "options"),
    [("h2o", {}), ("h2o2", {"score": "reconstruction", "observation_window": 8})],
    ids=["h2o", "reconstruction"],
)
def test_compiled_equals_eager(
    policy: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``vllm serve`` runs without further flags: through torch.compile, here past the budget."""
    monkeypatch.delenv("VLLM_USE_AOT_COMPILE")
    assert use_aot_compile()
    model = tiny_llama(tmp_path, 4, 4)
    prompts = mixed_prompts(CHARACTERS, 8, longest=60)
    options = {"budget": 32, **options}
    settings = {"options": options, "block_size": 16, "max_model_len": 128}
    eager = run(model, prompts, policy, **settings)
    compiled = run(model, prompts, policy, enforce_eager=False, **settings)
    assert assert_same_tokens(eager, compiled) <= 1


@pytest.mark.skipif(not loader.available(), reason="no native library has been built")
@pytest.mark.parametrize("policy", ["h2o", "h2o2"])
def test_torch_kernels_equal_native_ones(policy: str, tmp_path: Path) -> None:
    """Past the budget, whichever of the CPU's kernels are asked for by name.

    Without merging: of two keys that are as similar, rounding decides. What each merges is compared
    with the reference in test_retained.py.
    """
    model = tiny_llama(tmp_path, 4, 4)
    prompts = mixed_prompts(CHARACTERS, 8, longest=60)
    settings = {"block_size": 16, "max_model_len": 128}
    options = {"budget": 32} | ({"merge": 0} if policy == "h2o2" else {})
    native, torch = (
        run(model, prompts, policy, options=options | {"kernels": kernels}, **settings)
        for kernels in ("native", "torch")
    )
    assert assert_same_tokens(native, torch) <= 1


def test_a_threshold_that_no_key_reaches(tmp_path: Path) -> None:
    """Past the budget nothing is merged, and the tokens are those of an engine without masses."""
    model = tiny_llama(tmp_path, 6, 2)
    prompts = mixed_prompts(CHARACTERS, 8, longest=60)
    settings = {"block_size": 16, "max_model_len": 128}
    dropped, unmerged, merged = (
        run(model, prompts, "h2o", options={"budget": 32, "merge": merge}, **settings)
        for merge in (0.0, 0.9999999, 0.2)
    )
    assert assert_same_tokens(dropped, unmerged) <= 1
    assert token_ids(dropped) != token_ids(merged)


def test_a_prompt_of_three_times_the_pool(tmp_path: Path) -> None:
    """Packed after each chunk, it runs where stock vLLM would not start, and frees its pages."""
    model = tiny_llama(tmp_path, 4, 4)
    prompts = [(CHARACTERS * 2)[:384]]
    outputs = run(
        model,
        prompts,
        "h2o",
        options={"budget": 64, "eviction": "chunk"},
        block_size=16,
        num_gpu_blocks_override=9,
        max_num_batched_tokens=32,
        max_model_len=448,
    )
    assert len(outputs[0].outputs[0].token_ids) == 24


def test_every_policy_equals_stock(tmp_path: Path) -> None:
    """Each policy where its budget does not bind; and until it does, all being scored."""
    model = tiny_llama(tmp_path, 4, 4)
    prompts = mixed_prompts(CHARACTERS, 16, longest=220)
    settings = {"max_num_batched_tokens": 64, "max_model_len": 480}
    stock = run(model, prompts, None, **settings)
    # Those that generate what a budget of 256 does not hold.
    both = [(p, output) for p, output in zip(prompts, stock, strict=True) if len(p) > 128]
    longer, longer_stock = map(list, zip(*both, strict=True))
    for policy in policies():
        window = {"observation_window": 24} if policy in ("h2o2", "snapkv") else {}
        merge = {"merge": 0.5} if policy == "streaming" else {}
        options = None if policy == "full" else {"budget": 1.0, **window, **merge}
        ours = run(model, prompts, policy, options=options, **settings)
        assert assert_same_tokens(stock, ours) <= 1
        if options:
            few = {**options, "budget": 256}
            ours = run(model, longer, policy, options=few, max_tokens=128, **settings)
            assert assert_same_tokens(longer_stock, ours, first=24) <= 1
