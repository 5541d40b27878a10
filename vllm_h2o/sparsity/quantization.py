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
from vllm.platforms import current_platform

from vllm_h2o.sparsity.config import KEY, SparsityConfig
from vllm_h2o.sparsity.counts import Counts, folder_of
from vllm_h2o.sparsity.linear import Place, SparseDown, SparseUp


@register_quantization_config(KEY)
class ContextualSparsity(QuantizationConfig):
    """The linear methods of a model with contextual sparsity: stock's, but for its MLP."""

    _counts: Counts | None = None

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
        vllm_config = get_current_vllm_config()
        config = SparsityConfig.from_additional_config(vllm_config.additional_config)
        recall = config.recall if config is not None and prefix.endswith(".fc1") else None
        if config is None or (recall is None and not prefix.endswith(".fc2")):
            return UnquantizedLinearMethod()
        place = self._place(prefix, vllm_config)
        if recall is not None:
            return SparseUp(config.max_tokens, place, recall)
        return SparseDown(config.max_tokens, place)

    def _place(self, prefix: str, vllm_config: Any) -> Place:
        """Return the place of one more layer."""
        layers = vllm_config.compilation_config.static_forward_context
        name = prefix if current_platform.is_cpu() else ""
        folder, device = folder_of(vllm_config), current_platform.device_type
        if not folder.is_dir():  # no front end here shows them
            return Place(name, layers, torch.zeros(2, dtype=torch.int64, device=device))
        if self._counts is None:
            num_layers = vllm_config.model_config.hf_config.num_hidden_layers
            self._counts = Counts(folder, 2 * num_layers)
        return Place(name, layers, self._counts.take())
