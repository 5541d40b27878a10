# SPDX-License-Identifier: Apache-2.0
"""The seam: a quantization of vLLM's registry that gives the MLP linear methods of its own.

Nothing is quantized. Importing this module registers it, in every process that reads a config
which names it.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_h2o.sparsity.config import KEY, SparsityConfig
from vllm_h2o.sparsity.linear import SparseDown, SparseUp


@register_quantization_config(KEY)
class ContextualSparsity(QuantizationConfig):
    """The linear methods of a model with contextual sparsity: stock's, but for its MLP."""

    def get_name(self) -> str:  # type: ignore[override]
        """Name of the method."""
        return KEY

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of models that it takes."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the oldest GPU, as a number of two digits."""
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Name no file: the options are in ``additional_config``."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ContextualSparsity:
        """Make one; a checkpoint's own quantization is refused later."""
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Take a quantized checkpoint where it was asked for, so that the hooks refuse it."""
        return KEY if user_quant == KEY else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return a layer's linear method; None for what is not linear."""
        if not isinstance(layer, LinearBase):
            return None
        config = SparsityConfig.from_additional_config(get_current_vllm_config().additional_config)
        if config is not None and prefix.endswith(".fc2"):
            return SparseDown(config.max_tokens)
        if config is not None and config.recall is not None and prefix.endswith(".fc1"):
            return SparseUp(config.max_tokens, config.recall)
        return UnquantizedLinearMethod()
