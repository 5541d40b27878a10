# SPDX-License-Identifier: Apache-2.0
"""Which kernels compute, by device; said once in the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_h2o.errors import UnsupportedError
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.traits import FLOAT8
from vllm_h2o.worker.memory_efficient import (
    AMPERE,
    MemoryEfficientPrompt,
    XformersUnavailableError,
)

logger = init_logger("vllm.kv_policy")
PromptAttention = Callable[..., Any]
"""See ``kernels.triton.kernels``, which is loaded where there is a GPU."""


def select_kernels(
    vllm_config: VllmConfig, spec: AttentionSpec, device: torch.device, config: KVPolicyConfig
) -> Kernels:
    """The fastest that run on ``device``, or those that the policy's configuration asks for.

    Raises:
        UnsupportedError: when those are not there.

    """
    model_dtype = vllm_config.model_config.dtype if vllm_config.model_config else spec.dtype
    quantised = vllm_config.cache_config.cache_dtype in FLOAT8
    if device.type == "cuda":
        _check_for_gpu(spec, config, spec.dtype if quantised else model_dtype)
        return _triton(vllm_config, spec, device, quantised, config)
    return _cpu(spec, config.kernels, quantised or spec.dtype == model_dtype)


def _check_for_gpu(spec: AttentionSpec, config: KVPolicyConfig, dtype: torch.dtype) -> None:
    if spec.dtype != dtype:
        raise UnsupportedError(
            f"a KV cache of {spec.dtype}",
            f"the model computes in {dtype}",
            "the kernels for GPUs store K and V as they were computed",
            "use --kv-cache-dtype auto",
        )
    if config.kernels not in ("auto", "xformers"):
        raise UnsupportedError(
            f"kernels={config.kernels!r}",
            "the model runs on a GPU",
            "they compute on a CPU",
            "leave kernels out, or give xformers, which attends prompts there",
        )
    if config.schedule.by_page and spec.block_size.bit_count() != 1:
        raise UnsupportedError(
            "evict_every='page'",
            f"pages of {spec.block_size} tokens",
            "on a GPU pages are summed in powers of two",
            "give a block size that is a power of two, and beside states one that covers a state",
        )


def _cpu(spec: AttentionSpec, asked: str, known_dtype: bool) -> Kernels:
    from vllm_h2o.kernels.native import loader
    from vllm_h2o.kernels.native.layout import HEAD_MULTIPLE
    from vllm_h2o.kernels.torch.kernels import TorchKernels

    if asked == "xformers":
        raise UnsupportedError(
            "kernels='xformers'",
            "the model runs on a CPU",
            "xformers attends prompts on a GPU",
            "leave kernels out",
        )
    is_supported = spec.head_size % HEAD_MULTIPLE == 0 and known_dtype
    if asked == "torch" or (asked == "auto" and not is_supported):
        return TorchKernels()
    if not is_supported:
        raise UnsupportedError(
            "kernels='native'",
            f"heads of {spec.head_size} and a cache of {spec.dtype}",
            f"heads must be multiples of {HEAD_MULTIPLE}, and the model's dtype the cache's",
            "leave kernels out, and --kv-cache-dtype auto",
        )
    try:
        kernels = loader.load()
    except loader.NativeUnavailableError as error:
        if asked == "native":
            raise UnsupportedError(error.asked, error.found, error.why, error.remedy) from error
        logger.warning_once("h2o: the torch kernels compute, several times slower: %s", error)
        return TorchKernels()
    logger.info_once("h2o: C++ kernels, built for %s", kernels.variant)
    return kernels


def _triton(
    vllm_config: VllmConfig,
    spec: AttentionSpec,
    device: torch.device,
    quantised: bool,
    config: KVPolicyConfig,
) -> Kernels:
    from vllm_h2o.kernels.triton.kernels import TritonKernels

    num_heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
    capability = torch.cuda.get_device_capability(device)[0]
    asked = config.kernels == "xformers"
    attention, by = _prompts(spec, device, num_heads, capability, quantised, asked)
    name = torch.cuda.get_device_name(device)
    logger.info_once("h2o: Triton kernels on %s; prompts by %s", name, by)
    rows = vllm_config.scheduler_config.max_num_seqs
    shares_pages = bool(vllm_config.cache_config.enable_prefix_caching)
    sizes = (rows, num_heads, spec.num_kv_heads, spec.head_size)
    return TritonKernels(device, *sizes, attention, config.ranking.passes, shares_pages)


def _prompts(
    spec: AttentionSpec,
    device: torch.device,
    num_heads: int,
    capability: int,
    quantised: bool,
    asked: bool,
) -> tuple[PromptAttention | None, str]:
    """Choose what attends prompts without attention sinks, and its name for the log.

    FlashAttention begins with Ampere, has no float32, and pages in multiples of 16. Of a prompt's
    first chunk it and xformers take K and V as they were computed, and not what float8 leaves of
    them. What their log-sum-exp is with attention sinks has not been tried: layers that have them
    do without, in TritonKernels.

    Raises:
        UnsupportedError: when xformers is ``asked`` for, and does not go.

    """
    own = (None, "a Triton kernel of our own")
    if not asked and capability >= AMPERE:
        return _flash(spec) if not quantised and spec.dtype != torch.float32 else own
    try:
        if quantised:
            raise XformersUnavailableError("K and V are stored in float8")
        attention = MemoryEfficientPrompt.load()
        attention.try_on((num_heads, spec.num_kv_heads, spec.head_size), spec.dtype, device)
    except XformersUnavailableError as error:
        if asked:
            remedy = "--kv-cache-dtype auto" if quantised else "pip install 'vllm-h2o[xformers]'"
            raise UnsupportedError(
                "kernels='xformers'",
                str(error),
                "prompts would be attended by its memory-efficient attention",
                f"{remedy}, or leave kernels out",
            ) from error
        logger.warning_once("h2o: prompts are attended slowly, without matrix units: %s", error)
        return own
    return attention, "xformers, but for attention sinks"


def _flash(spec: AttentionSpec) -> tuple[PromptAttention | None, str]:
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    from vllm_h2o.worker.flash import FlashPrompt

    fits = spec.block_size % 16 == 0 and spec.head_size % 8 == 0 and spec.head_size <= 256
    version = get_flash_attn_version(head_size=spec.head_size) if fits else None
    if version is None:
        return None, "a Triton kernel of our own"
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    attention = FlashPrompt(flash_attn_varlen_func, version)
    return attention, f"FlashAttention {version}, but for attention sinks"
