# SPDX-License-Identifier: Apache-2.0
"""What the engine keeps is what the reference keeps: every layer and KV head, every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.e2e.harness import (
    CHARACTERS,
    TEXT,
    shrink_terms,
    smollm2,
    tiny_llama,
    tiny_opt,
    unlike_heads,
)
from tests.e2e.oracle import follow
from vllm_h2o.worker import rotary

LENGTHS = (5, 31, 32, 33, 90, 150)
"""Prompts shorter and longer than a capacity of 32."""


@pytest.fixture(autouse=True)
def _small_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts have several blocks of a rotated term here, and a lifetime ends while they run."""
    shrink_terms(monkeypatch, block=48, lifetime=9)


@pytest.mark.parametrize("num_heads", [(4, 4), (6, 2), (8, 1)], ids=["gqa1", "gqa3", "gqa8"])
def test_tiny_models_of_each_gqa_group(
    num_heads: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """h2o with half heavy, half recent; (H, R) with R = 0 and with H = 0; two budgets."""
    model = tiny_llama(tmp_path, *num_heads)
    prompts = [CHARACTERS[n : n + n] for n in LENGTHS]
    for options in (
        {"budget": 32},
        {"budget": 48, "recent_ratio": 0.0},
        {"budget": 32, "recent_ratio": 1.0},
        {"budget": 32, "recent_ratio": 0.25, "num_sink_tokens": 3},
    ):
        follow(
            monkeypatch, model, "h2o", options, prompts, block_size=16, max_num_batched_tokens=64
        )


@pytest.mark.parametrize("policy", ["local", "streaming"])
def test_the_other_policies(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """local is a window of R + self, streaming sinks + window."""
    model = tiny_opt(tmp_path)
    prompts = [CHARACTERS[n : n + n] for n in LENGTHS]
    oracle = follow(
        monkeypatch,
        model,
        policy,
        {"budget": 32},
        prompts,
        block_size=16,
        max_num_batched_tokens=64,
    )
    for (_, _, request_id), retained in oracle.retained.items():
        end = LENGTHS[int(request_id.split("-")[0])] + 39  # the last token sampled is not computed
        sinks = 4 if policy == "streaming" else 0
        assert retained == {*range(sinks), *range(end - 32 + sinks, end)}


@pytest.mark.parametrize(
    "options",
    [
        {"score": "sum_squares"},
        {"score": "mean", "num_sink_tokens": 2},
        {"policy": "snapkv", "observation_window": 20},
        {"eviction": "chunk", "num_sink_tokens": 7},
        {"budget": 0.5, "budget_basis": "prompt"},
        {"budget": 0.4, "budget_basis": "request", "min_budget": 32, "score": "mean"},
        {"policy": "snapkv", "observation_window": 20, "eviction": "chunk"},
        {"policy": "h2o2", "observation_window": 12, "num_sink_tokens": 1, "merge": 0.2},
        {"policy": "h2o2", "observation_window": 7, "eviction": "chunk", "merge": 0.2},
        {"policy": "h2o2", "observation_window": 12, "kernels": "torch", "merge": 0.5},
        {"score": "reconstruction", "observation_window": 12, "split": "none"},
        {"score": "reconstruction", "observation_window": 7, "eviction": "chunk"},
        {"score": "reconstruction", "observation_window": 9, "kernels": "torch", "split": "none"},
        {"merge": 0.2},
        {"merge": 0.2, "kernels": "torch", "score": "mean_squares"},
        {"merge": 0.5, "eviction": "chunk", "num_sink_tokens": 2},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_the_other_options(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other scores, other queries that score, prompts in chunks, budgets of requests."""
    prompts = [CHARACTERS[n : n + n] for n in LENGTHS]
    model, options = tiny_llama(tmp_path, 6, 2), {"budget": 32, **options}
    policy = options.pop("policy", "h2o2" if options.get("score") == "reconstruction" else "h2o")
    settings = {"block_size": 16, "max_num_batched_tokens": 40, "max_num_seqs": 8}
    oracle = follow(monkeypatch, model, policy, options, prompts, **settings)
    assert (oracle.num_merged > 0) is oracle.scheduler.policy_config.merges


@pytest.mark.parametrize("policy", ["local", "streaming", "h2o2"])
def test_merging_of_the_other_policies(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every head its own K and V, in a step's batch with sequences that are short or begin.

    In 16 bits, to which rotated queries of a second pass are rounded, too.
    """
    shrink_terms(monkeypatch, lifetime=128)  # else scores near zero are compared
    prompts = [CHARACTERS[n : n + n] for n in LENGTHS]
    model, options = tiny_llama(tmp_path, 4, 4), {"budget": 32, "merge": 0.2}
    settings = {"block_size": 16, "max_num_batched_tokens": 128, "dtype": "bfloat16"}
    settings |= {"max_error": 2e-2, "max_ties": 1e-3}
    oracle = follow(monkeypatch, model, policy, options, prompts, **settings)
    assert oracle.num_merged > 0


def test_combined_without_rotary_leaves_the_second_pass_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPT learns its positions: the second pass of `combined` is left out, and that is said."""
    said: list[str] = []
    monkeypatch.setattr(rotary.logger, "warning", lambda *args: said.append(args[0] % args[1:]))
    prompts = [CHARACTERS[n : n + n] for n in LENGTHS]
    follow(monkeypatch, tiny_opt(tmp_path), "h2o2", {"budget": 32}, prompts, block_size=16)
    assert len(said) == 1 and said[0].endswith("does not scale, is left out.")


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "h2o2", "observation_window": 12, "num_sink_tokens": 1, "merge": 0},
        {"policy": "h2o2", "observation_window": 12, "merge": 0.2},
        {"score": "sum_squares"},
        {"policy": "snapkv", "observation_window": 20, "recent_ratio": 0.25},
        {"policy": "snapkv", "enable_prefix_caching": True},
        {"score": "mean_squares", "merge": 0.2},
        {"kernels": "torch", "score": "mean_squares", "budget": 0.4, "budget_basis": "request"},
        {"score": "mean_squares", "split": "layers"},
        {"kernels": "torch", "score": "mean_squares", "split": "layers", "merge": 0.2},
        {"policy": "h2o2", "observation_window": 12, "split": "layers", "merge": 0},
        {"score": "reconstruction", "observation_window": 12, "split": "layers", "merge": 0.2},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_heads_that_share_slots(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three KV heads with unequal numbers of tokens, beside requests that are not evicted from."""
    prompts = [CHARACTERS[n : n + n] for n in (*LENGTHS, 63)]
    tiny_llama(tmp_path, 6, 3)
    model, options = unlike_heads(tmp_path, 3), {"budget": 64, "split": "heads", **options}
    policy = options.pop("policy", "h2o2" if options.get("score") == "reconstruction" else "h2o")
    settings = {"block_size": 16, "max_num_batched_tokens": 128}
    settings |= {k: options.pop(k) for k in ("enable_prefix_caching",) if k in options}
    oracle = follow(monkeypatch, model, policy, options, prompts, **settings)
    assert oracle.num_unequal > 0
    assert (oracle.num_merged > 0) is oracle.scheduler.policy_config.merges


def test_a_second_reading_without_rotary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OPT learns its positions, and reads again like any other model; layers share slots."""
    prompts = [CHARACTERS[n : n + n] for n in LENGTHS]
    model, options = tiny_opt(tmp_path), {"budget": 32, "score": "reconstruction"}
    oracle = follow(monkeypatch, model, "h2o2", options, prompts, block_size=16)
    assert oracle.num_unequal > 0


@pytest.mark.parametrize(
    ("policy", "options"),
    [("h2o", {"budget": 32}), ("h2o2", {"budget": 64}), ("h2o2", {"score": "reconstruction"})],
    ids=["h2o", "h2o2", "reconstruction"],
)
def test_smollm2_retained_sets_equal_the_reference(
    policy: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real model: 30 layers, 3 KV heads, GQA 3."""
    model = smollm2()
    tokens = AutoTokenizer.from_pretrained(model)(TEXT)["input_ids"]
    prompts = [tokens[:20], tokens[100:190]]
    options = {"budget": 64, **options}
    oracle = follow(monkeypatch, model, policy, options, prompts, block_size=16)
    assert (oracle.num_unequal > 0) is oracle.scheduler.policy_config.splits
    assert (oracle.num_merged > 0) is oracle.scheduler.policy_config.merges
    different = {oracle.retained[where] for where in oracle.retained if where[2].startswith("1")}
    assert len(different) > 60  # heads and layers choose for themselves
