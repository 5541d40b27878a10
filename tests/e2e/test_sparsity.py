# SPDX-License-Identifier: Apache-2.0
"""Contextual sparsity gives stock's tokens, and reads the used rows alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import OPTConfig

from benchmarks.throughput.models import write_sparse
from tests.e2e import ranks
from tests.e2e.harness import (
    CHARACTERS,
    arguments,
    assert_same_tokens,
    engine,
    generate,
    mixed_prompts,
    run,
)

ZEROS = 0.9
H2O: dict[str, Any] = {"policy": "h2o", "options": {"budget": 32}, "block_size": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An OPT of random weights whose ReLU leaves a tenth of the neurons."""
    config = OPTConfig(
        vocab_size=256,
        hidden_size=128,
        ffn_dim=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        word_embed_proj_dim=128,
    )
    return write_sparse(config, tmp_path_factory.mktemp("model"), ZEROS, 0.15)


def said(model: str, mode: str | None, **settings: Any) -> Any:
    """The tokens of prompts in twos: a step of both is sparse, prompts are dense."""
    prompts = mixed_prompts(CHARACTERS, 8, longest=60)
    given = {"policy": None, "max_num_seqs": 2, "max_model_len": 128, **settings}
    return run(model, prompts, given.pop("policy"), contextual_sparsity=mode, **given)


def counts(worker: Any) -> list[list[int]]:
    """Rows read and rows there, of each layer of a worker."""
    return [
        module.counts.tolist()
        for name, module in worker.get_model().named_modules()
        if name.endswith(".fc2")
    ]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_exact_equals_stock(model: str, eager: bool) -> None:
    """In float32."""
    stock = said(model, None)
    assert assert_same_tokens(stock, said(model, "exact", enforce_eager=eager)) == 0


def test_exact_with_a_policy_equals_the_policy(model: str) -> None:
    """Past the budget."""
    assert assert_same_tokens(said(model, None, **H2O), said(model, "exact", **H2O)) == 0


def test_exact_on_two_ranks_equals_one(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half of the neurons each."""
    stock = said(model, None)
    ranks.install(monkeypatch)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert assert_same_tokens(stock, said(model, "exact", tensor_parallel_size=2)) == 0


def test_exact_reads_the_used_rows_alone(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """About a tenth for one sequence; a prompt of more than max_tokens is not counted."""
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    settings = arguments(model, contextual_sparsity="exact", max_model_len=128)
    settings.pop("model")
    with engine(model, **settings) as llm:
        generate(llm, [CHARACTERS[:40]], 32)
        layers = llm.collective_rpc(counts)[0]
    used, there = torch.tensor(layers, dtype=torch.float64).unbind(1)
    assert there.tolist() == [31 * 512] * 2
    share = (used / there).mean().item()
    assert share == pytest.approx(1 - ZEROS, abs=0.06)
