# SPDX-License-Identifier: Apache-2.0
"""A request does not notice its neighbours, nor a pool that is too small."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams

from tests.e2e.harness import (
    CHARACTERS,
    TEXT,
    Probe,
    engine,
    generate,
    smollm2,
    tiny_llama,
    token_ids,
)
from tests.e2e.oracle import Oracle
from vllm_h2o.errors import ConfigError


@pytest.mark.parametrize("policy", ["h2o", "h2o2"])
def test_alone_and_among_fifteen_others(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same retained sets in every layer and head, and the same tokens.

    A step has no room for all prompts; where queries are asked again, none is cut for that.
    """
    model = smollm2()
    tokens = AutoTokenizer.from_pretrained(model)(TEXT)["input_ids"]
    one = tokens[300:370]
    others = [tokens[50 * i : 50 * i + 10 + 7 * i] for i in range(15)]
    settings = {"block_size": 16, "max_num_batched_tokens": 160, "max_num_seqs": 16}
    with monkeypatch.context() as patch, engine(model, policy, {"budget": 32}, **settings) as llm:
        oracle = Oracle(Probe(llm).scheduler).install(patch)
        alone = token_ids(generate(llm, [one], max_tokens=16))[0]
        llm.collective_rpc("finish_step")  # no other step may have followed the last
        kept_alone = {where[:2]: kept for where, kept in oracle.retained.items()}
        oracle.retained.clear()
        among = token_ids(generate(llm, [*others[:7], one, *others[7:]], max_tokens=16))[7]
        llm.collective_rpc("finish_step")
    kept_among = {
        where[:2]: kept for where, kept in oracle.retained.items() if where[2].startswith("8-")
    }
    assert among == alone
    assert len(kept_alone) == 90
    assert kept_among == kept_alone


def test_budgets_of_their_own_in_one_batch(tmp_path: Path) -> None:
    """Each request gets the tokens, and holds the pages, that an engine of its budget gives it."""
    model = tiny_llama(tmp_path, 4, 2)
    prompt = CHARACTERS[:90]
    budgets: list[int | float | str] = [48, 0.25, "full", 0.5, "64"]
    expected, pages = [], [3, 4, 9, 8, 4]
    for budget in (48, 64, 256, 128, 64):
        with engine(model, "h2o", {"budget": budget}, max_model_len=256, block_size=16) as llm:
            expected += token_ids(generate(llm, [prompt], max_tokens=50))
    assert len({tuple(tokens) for tokens in expected}) >= 3
    with engine(model, "h2o", {"budget": 32}, max_model_len=256, block_size=16) as llm:
        probe = Probe(llm)
        params = [
            SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, detokenize=False,
                           extra_args={"kv_budget": budget})
            for budget in budgets
        ]  # fmt: skip
        prompts = [{"prompt_token_ids": prompt}] * len(params)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert token_ids(outputs) == expected
        assert list(probe.held[-1].values()) == pages
        with pytest.raises(ConfigError, match=r"kv_budget=0\.0 is not supported"):
            generate(llm, [prompt], max_tokens=5, extra_args={"kv_budget": 0.0})
        assert len(token_ids(generate(llm, [prompt], max_tokens=5))[0]) == 5
        assert probe.num_free == probe.num_total


def test_full_in_a_small_pool_gives_the_tokens_of_a_large_one(tmp_path: Path) -> None:
    """Forced preemptions: everything is computed again, and nothing changes."""
    model = tiny_llama(tmp_path, 4, 4)
    prompts = [CHARACTERS[n : n + 20 + 5 * n] for n in range(12)]
    results = {}
    for pages in (500, 24):
        with engine(
            model, "full", num_gpu_blocks_override=pages, max_model_len=256, block_size=16
        ) as llm:
            probe = Probe(llm)
            results[pages] = token_ids(generate(llm, prompts, max_tokens=60))
            assert (probe.num_preemptions > 5) == (pages == 24)
            assert probe.num_free == probe.num_total == pages - 1
    assert results[24] == results[500]


def test_h2o_in_a_small_pool_completes(tmp_path: Path) -> None:
    """Preempted requests begin again with what they had generated as their prompt, and finish."""
    model = tiny_llama(tmp_path, 4, 4)
    prompts = [CHARACTERS[n : n + 20 + 5 * n] for n in range(12)]
    with engine(
        model,
        "h2o",
        {"budget": 96},
        num_gpu_blocks_override=24,
        max_model_len=256,
        block_size=16,
        max_num_batched_tokens=64,
    ) as llm:
        probe = Probe(llm)
        outputs = token_ids(generate(llm, prompts, max_tokens=150))
        assert probe.num_preemptions > 0
        assert probe.num_free == probe.num_total
    assert [len(tokens) for tokens in outputs] == [150] * 12


def test_beam_search_counts_no_evicted_tokens() -> None:
    """Each beam and token is a prompt of its own, over when its one token is sampled."""
    model = smollm2()
    prompt = AutoTokenizer.from_pretrained(model)(TEXT)["input_ids"][:100]
    found = {}
    for budget in (32, 1.0):
        settings = {"block_size": 16, "skip_tokenizer_init": False}
        with engine(model, "h2o", {"budget": budget}, **settings) as llm:
            params = BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True)
            (output,) = llm.beam_search([{"prompt_token_ids": prompt}], params)
            found[budget] = [beam.tokens for beam in output.sequences]
            stats = Probe(llm).scheduler.ledger.stats
            assert (stats.evicted_tokens, stats.packs) == (0, 0)
            generate(llm, [prompt], max_tokens=2)
            assert (stats.evicted_tokens > 0) == (budget == 32)
    assert found[32] == found[1.0]


def test_more_sequences_run_at_once(tmp_path: Path) -> None:
    """The pool that holds 3 full sequences of stock vLLM runs 12 at a quarter of the budget."""
    model = tiny_llama(tmp_path, 4, 4)
    prompts = [CHARACTERS[n : n + 40] for n in range(12)]
    running = {}
    for policy, options in (("full", None), ("h2o", {"budget": 64})):
        with engine(
            model, policy, options, num_gpu_blocks_override=49, max_model_len=256, block_size=16
        ) as llm:
            probe = Probe(llm)
            generate(llm, prompts, max_tokens=200)
            running[policy] = max(len(step) for step in probe.held[-60:])
            if policy == "h2o":
                assert probe.num_preemptions == 0
                past_prompt = probe.held[5:]
                assert max(max(step.values(), default=0) for step in past_prompt) == 4
    assert running["h2o"] == 12
    assert running["full"] <= 4
