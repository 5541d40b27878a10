# SPDX-License-Identifier: Apache-2.0
"""Contextual sparsity gives stock's tokens, or nearly those, and reads the used rows alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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
    token_ids,
)
from tests.tiny_models import two_layer_opt
from vllm_h2o.kernels.triton.neurons import TritonNeurons
from vllm_h2o.sparsity import ops
from vllm_h2o.sparsity.config import MODES
from vllm_h2o.sparsity.counts import folder_of

ZEROS = 0.9
SAME = 0.8
"""Share of tokens that a recall of .99 leaves as they are, at least."""
H2O: dict[str, Any] = {"policy": "h2o", "options": {"budget": 32}, "block_size": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An OPT of random weights whose ReLU leaves a tenth of the neurons."""
    return write_sparse(two_layer_opt(512, 512), tmp_path_factory.mktemp("model"), ZEROS, 0.15)


def said(model: str, mode: str | None, **settings: Any) -> Any:
    """The tokens of prompts in twos: a step of both is sparse, prompts are dense."""
    prompts = mixed_prompts(CHARACTERS, 8, longest=60)
    given = {"policy": None, "max_num_seqs": 2, "max_model_len": 128, **settings}
    return run(model, prompts, given.pop("policy"), contextual_sparsity=mode, **given)


def same_share(stock: Any, ours: Any) -> float:
    """Share of the tokens that are stock's."""
    pairs = zip(sum(token_ids(stock), []), sum(token_ids(ours), []), strict=True)
    return torch.tensor([a == b for a, b in pairs]).float().mean().item()


def counts(worker: Any) -> dict[str, list[list[int]]]:
    """Rows read and rows there, of each layer of a worker, for both matrices."""
    modules = list(worker.get_model().named_modules())
    return {
        end: [module.counts.tolist() for name, module in modules if name.endswith(f".{end}")]
        for end in ("fc1", "fc2")
        if any(name.endswith(f".{end}") and hasattr(module, "counts") for name, module in modules)
    }


def shares(model: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Rows read of rows there in 31 steps of one sequence; its prompt is not counted."""
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    settings = arguments(model, contextual_sparsity=mode, max_model_len=128)
    settings.pop("model")
    with engine(model, **settings, disable_log_stats=False) as llm:
        generate(llm, [CHARACTERS[:40]], 32)
        by_matrix = llm.collective_rpc(counts)[0]
        shown = {metric.name: metric.value for metric in llm.get_metrics() if "rows" in metric.name}
        folder = folder_of(llm.llm_engine.vllm_config)
        assert [path.name for path in folder.iterdir()] == [str(os.getpid())]
    totals = torch.tensor(sum(by_matrix.values(), [])).sum(0).tolist()
    assert shown == dict(zip(["vllm:mlp_rows_used", "vllm:mlp_rows_stock"], totals, strict=True))
    found = {}
    for name, layers in by_matrix.items():
        used, there = torch.tensor(layers, dtype=torch.float64).unbind(1)
        assert there.tolist() == [31 * 512] * 2
        found[name] = (used / there).mean().item()
    return found


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_exact_equals_stock(model: str, eager: bool) -> None:
    """In float32."""
    stock = said(model, None)
    assert assert_same_tokens(stock, said(model, "exact", enforce_eager=eager)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_kernels_of_gpus_say_what_those_of_cpus_say(
    model: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter."""
    settings = arguments(model, contextual_sparsity=mode, max_model_len=64, max_num_seqs=2)
    settings.pop("model")

    def tokens() -> list[list[int]]:
        with engine(model, **settings) as llm:
            return token_ids(generate(llm, [CHARACTERS[:9], CHARACTERS[20:40]], 6))

    cpu = tokens()
    used: list[str] = []
    for name in ("up", "down"):
        monkeypatch.setattr(TritonNeurons, name, seen(getattr(TritonNeurons, name), used))
    monkeypatch.setattr(ops, "kernels_of", lambda device: TritonNeurons())
    assert tokens() == cpu
    assert set(used) == ({"down"} if mode == "exact" else {"up", "down"})


def seen(kernel: Callable[..., Any], used: list[str]) -> Callable[..., Any]:
    """Note the name of a kernel whenever it is called."""

    def called(*given: Any) -> Any:
        used.append(kernel.__name__)
        return kernel(*given)

    return called


def test_exact_with_a_policy_equals_the_policy(model: str) -> None:
    """Past the budget."""
    assert assert_same_tokens(said(model, None, **H2O), said(model, "exact", **H2O)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mode", MODES)
def test_sixteen_bits_are_nearly_stock(model: str, mode: str, dtype: str) -> None:
    """The type of most checkpoints; sums are of float32 here, and rounded less than stock's."""
    share = same_share(said(model, None, dtype=dtype), said(model, mode, dtype=dtype))
    assert share > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_reloaded_weights_are_those_that_are_read(
    model: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: a model's own, and another's, whose tokens are said then."""
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    other = write_sparse(two_layer_opt(512, 512), tmp_path, ZEROS, 0.3)
    settings = arguments(model, contextual_sparsity=mode, max_model_len=64)
    settings.pop("model")

    def tokens(llm: Any) -> list[list[int]]:
        return token_ids(generate(llm, [CHARACTERS[:9], CHARACTERS[20:40]], 12))

    with engine(other, **settings) as llm:
        wanted = tokens(llm)
    with engine(model, **settings) as llm:
        before = tokens(llm)
        llm.collective_rpc("reload_weights")
        assert tokens(llm) == before
        llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
        assert tokens(llm) == wanted != before


def test_exact_on_two_ranks_equals_one(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half of the neurons each."""
    stock = said(model, None)
    ranks.install(monkeypatch)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert assert_same_tokens(stock, said(model, "exact", tensor_parallel_size=2)) == 0


def test_exact_reads_the_used_rows_of_fc2(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """About a tenth for one sequence."""
    assert shares(model, "exact", monkeypatch) == {"fc2": pytest.approx(1 - ZEROS, abs=0.06)}


def test_predicted_reads_few_rows_of_both(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fc1 some more than are used, which it cannot tell from those."""
    found = shares(model, "predicted", monkeypatch)
    assert found["fc2"] == pytest.approx(1 - ZEROS, abs=0.06)
    assert found["fc2"] < found["fc1"] < found["fc2"] + 0.04


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_predicted_is_nearly_stock(model: str, eager: bool) -> None:
    """Random weights have many near ties."""
    share = same_share(said(model, None), said(model, "predicted", enforce_eager=eager))
    assert share > SAME


def test_predicted_on_two_ranks_is_nearly_stock(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half of the neurons each, with a copy of its own."""
    stock = said(model, None)
    ranks.install(monkeypatch)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert same_share(stock, said(model, "predicted", tensor_parallel_size=2)) > SAME


def test_predicted_with_a_policy_is_nearly_the_policy(model: str) -> None:
    """Past the budget."""
    assert same_share(said(model, None, **H2O), said(model, "predicted", **H2O)) > SAME
