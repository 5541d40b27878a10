# SPDX-License-Identifier: Apache-2.0
"""Ask vLLM for the linear methods of contextual sparsity, and refuse models without a ReLU MLP."""

from __future__ import annotations

import logging
from typing import Any

from vllm_h2o.errors import SparsityError
from vllm_h2o.sparsity.config import KEY, SparsityConfig

logger = logging.getLogger("vllm.contextual_sparsity")


def prepare_sparsity(engine_args: Any) -> SparsityConfig | None:
    """Set vLLM's quantization, the seam of the linear methods, before vLLM builds its config.

    Returns:
        The configuration; None when there is none, and nothing changes.

    Raises:
        SparsityError: when another quantization is given.

    """
    config = SparsityConfig.from_additional_config(engine_args.additional_config)
    if config is None:
        return None
    import vllm_h2o.sparsity.quantization  # noqa: F401 (which registers it)

    if engine_args.quantization not in (None, KEY):
        raise _quantized(config, f"--quantization is {engine_args.quantization}")
    engine_args.additional_config = {**engine_args.additional_config, KEY: config.to_dict()}
    engine_args.quantization = KEY
    return config


def check_sparsity(vllm_config: Any, config: SparsityConfig | None) -> Any:
    """Refuse engines whose MLP cannot be skipped, and say at start what is skipped.

    Args:
        vllm_config: vLLM's finished config.
        config: the configuration; None refuses nothing.

    Returns:
        ``vllm_config``.

    Raises:
        SparsityError: for another model than OPT with ReLU, a quantized one, and LoRA.

    """
    if config is None:
        return vllm_config
    from vllm import envs
    from vllm.platforms import current_platform

    hf = vllm_config.model_config.hf_config.to_dict()
    check_model(hf, config.mode)
    if hf.get("quantization_config") is not None:
        raise _quantized(config, "the checkpoint is quantized")
    if vllm_config.lora_config is not None:
        raise SparsityError(
            f"contextual_sparsity={config.mode!r}",
            "LoRA is enabled",
            "an adapter of the MLP adds to what the skipped rows give",
            "leave --enable-lora out, or run without --contextual-sparsity",
        )
    if envs.VLLM_BATCH_INVARIANT:
        raise SparsityError(
            f"contextual_sparsity={config.mode!r}",
            "VLLM_BATCH_INVARIANT is set",
            "which rows a step reads depends on its other tokens, and so does the order of sums",
            "unset it, or run without --contextual-sparsity",
        )
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        raise SparsityError(
            f"contextual_sparsity={config.mode!r}",
            f"the platform is {current_platform.device_name}",
            "its kernels compute on a CPU or an NVIDIA GPU",
            "use one of these, or run without --contextual-sparsity",
        )
    from vllm_h2o.sparsity.counts import make_folder, shown
    from vllm_h2o.sparsity.ops import kernels_of

    if shown(vllm_config):
        make_folder(vllm_config)
    logger.info(
        "contextual sparsity: %s, recall %g, %d layers, kernels %s. Steps of up to %d tokens skip "
        "unused rows of %s.",
        config.mode,
        1 if config.recall is None else config.recall,
        hf["num_hidden_layers"],
        kernels_of(current_platform.device_type).name,
        config.max_tokens,
        "fc2" if config.recall is None else "fc1 and fc2",
    )
    return vllm_config


def check_model(hf: dict[str, Any], mode: str) -> None:
    """Refuse a model by its config, as a dictionary, if it has no ReLU between fc1 and fc2.

    Raises:
        SparsityError: for another model than OPT with ReLU.

    """
    if hf.get("model_type") == "opt" and hf.get("activation_function") == "relu":
        return
    found = hf.get("activation_function") or hf.get("hidden_act") or "no ReLU"
    raise SparsityError(
        f"contextual_sparsity={mode!r}",
        f"the model is {hf.get('model_type')} with {found}",
        "neurons are skipped that ReLU sets to zero between fc1 and fc2, as in OPT",
        "use an OPT with ReLU, or run without --contextual-sparsity",
    )


def _quantized(config: SparsityConfig, found: str) -> SparsityError:
    return SparsityError(
        f"contextual_sparsity={config.mode!r}",
        found,
        "the kernels read rows of 16 or 32 bits",
        "use the model in bfloat16, float16 or float32, or run without --contextual-sparsity",
    )
