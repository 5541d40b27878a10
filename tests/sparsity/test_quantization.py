# SPDX-License-Identifier: Apache-2.0
"""The seam gives the MLP linear methods of its own, and every other layer stock's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config

from tests.tiny_models import engine_config, folder
from vllm_h2o.kernels.coarse import coarsen
from vllm_h2o.kernels.torch.neurons import TorchNeurons
from vllm_h2o.sparsity import ops
from vllm_h2o.sparsity.config import KEY
from vllm_h2o.sparsity.counts import Counts
from vllm_h2o.sparsity.linear import Place, SparseDown, SparseUp
from vllm_h2o.sparsity.ops import down, up
from vllm_h2o.sparsity.quantization import ContextualSparsity


def test_the_mlp_alone_has_other_methods(tmp_path_factory: pytest.TempPathFactory) -> None:
    """By the name that vLLM gives a layer."""
    opt = folder(tmp_path_factory.mktemp("models"), "OPTForCausalLM")
    assert get_quantization_config(KEY) is ContextualSparsity
    linear = LinearBase.__new__(LinearBase)
    with set_current_vllm_config(engine_config(opt, contextual_sparsity="exact")):
        method = ContextualSparsity().get_quant_method
        assert type(method(linear, "layers.0.fc2")) is SparseDown
        assert type(method(linear, "layers.0.fc1")) is UnquantizedLinearMethod
        assert method(torch.nn.Identity(), "layers.0.attn") is None
    with set_current_vllm_config(engine_config(opt, contextual_sparsity="predicted")):
        assert type(method(linear, "layers.0.fc1")) is SparseUp
        assert type(method(linear, "layers.0.fc2")) is SparseDown
        assert type(method(linear, "layers.0.out_proj")) is UnquantizedLinearMethod


@contextmanager
def rearranged(weight: torch.Tensor, bias: torch.Tensor | None, tmp_path: Path) -> Iterator[str]:
    """Rearrange a layer's weight, [out, in], as it is when it has been loaded; yield its name."""
    layer = torch.nn.Linear(*weight.t().shape, bias=bias is not None, dtype=weight.dtype)
    layer.weight.data = weight.clone()
    if bias is not None:
        layer.bias.data = bias.clone()
    layers: dict[str, Any] = {}
    place = Place("fc", layers, Counts(tmp_path, 1).take())
    SparseDown(4, place).process_weights_after_loading(layer)
    with override_forward_context(SimpleNamespace(no_compile_layers=layers)):
        yield "fc"


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [None, torch.ones(16)])
def test_steps_of_more_tokens_are_dense(
    bias: torch.Tensor | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    """They read every row, and are not counted."""
    x, rows = torch.eye(5, 8, dtype=dtype), torch.randn(8, 16).to(dtype)
    counts, bias = torch.zeros(2, dtype=torch.int64), None if bias is None else bias.to(dtype)
    with rearranged(rows.t(), bias, tmp_path) as name:
        dense = down(x, rows, bias, counts, name, 4)
        assert counts.tolist() == [0, 0]
        torch.testing.assert_close(down(x, rows, bias, counts, name, 5), dense)
    assert counts.tolist() == [5, 8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [None, torch.ones(16)])
def test_first_products_of_more_tokens_are_dense(
    bias: torch.Tensor | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Steps of fewer keep those above the cut as they are, and count rows."""
    torch.manual_seed(0)
    x, rows = torch.randn(5, 8).to(dtype), torch.randn(16, 8).to(dtype)
    counts, bias = torch.zeros(2, dtype=torch.int64), None if bias is None else bias.to(dtype)
    copy = vars(coarsen(rows, bias, 0.99)).values()
    with rearranged(rows, bias, tmp_path) as name:
        dense = up(x, rows, bias, *copy, counts, name, 4)
        torch.testing.assert_close(dense, torch.nn.functional.linear(x, rows, bias))
        assert counts.tolist() == [0, 0]
        sparse = up(x, rows, bias, *copy, counts, name, 5)
    assert counts[1] == 16
    assert (sparse != 0).any() and (sparse == 0).any()
    torch.testing.assert_close(sparse, dense.where(sparse != 0, 0))


@pytest.mark.parametrize("bias", [True, False])
def test_kernels_of_gpus_run_once_before_they_serve(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every number of tokens that skips rows; nothing is counted, and nothing is rearranged."""
    ran: list[tuple[str, int]] = []
    kernels = TorchNeurons()

    def seen(name: str) -> Any:
        def called(x: torch.Tensor, *given: Any) -> torch.Tensor:
            ran.append((name, len(x)))
            y: torch.Tensor = getattr(kernels, name)(x, *given)
            return y

        return called

    monkeypatch.setattr(
        ops, "kernels_of", lambda device: SimpleNamespace(up=seen("up"), down=seen("down"))
    )
    place = Place("", {}, torch.zeros(2, dtype=torch.int64))
    layers = {"up": SparseUp(3, place, 0.99), "down": SparseDown(3, place)}
    for method in layers.values():
        method.process_weights_after_loading(
            torch.nn.Linear(64, 32, bias=bias).requires_grad_(False)
        )
    assert ran == [(name, tokens) for name in layers for tokens in (1, 2, 3)]
    assert place.counts.tolist() == [0, 0] and place.layers == {}
