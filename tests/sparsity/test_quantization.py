# SPDX-License-Identifier: Apache-2.0
"""The seam gives fc2 a linear method of its own, and every other layer stock's."""

from __future__ import annotations

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config

from tests.tiny_models import engine_config, folder
from vllm_h2o.sparsity.config import KEY
from vllm_h2o.sparsity.linear import SparseDown
from vllm_h2o.sparsity.ops import down
from vllm_h2o.sparsity.quantization import ContextualSparsity


def test_fc2_alone_has_another_method(tmp_path_factory: pytest.TempPathFactory) -> None:
    """By the name that vLLM gives a layer."""
    opt = folder(tmp_path_factory.mktemp("models"), "OPTForCausalLM")
    assert get_quantization_config(KEY) is ContextualSparsity
    linear = LinearBase.__new__(LinearBase)
    with set_current_vllm_config(engine_config(opt, contextual_sparsity="exact")):
        method = ContextualSparsity().get_quant_method
        assert type(method(linear, "layers.0.fc2")) is SparseDown
        assert type(method(linear, "layers.0.fc1")) is UnquantizedLinearMethod
        assert method(torch.nn.Identity(), "layers.0.attn") is None


@pytest.mark.parametrize("bias", [None, torch.ones(16)])
def test_steps_of_more_tokens_are_dense(bias: torch.Tensor | None) -> None:
    """They read every row, and are not counted."""
    x, rows, counts = torch.eye(5, 8), torch.randn(8, 16), torch.zeros(2, dtype=torch.int64)
    dense = down(x, rows, bias, counts, 4)
    assert counts.tolist() == [0, 0]
    torch.testing.assert_close(down(x, rows, bias, counts, 5), dense)
    assert counts.tolist() == [5, 8]
