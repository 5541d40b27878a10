"""Which kernels compute, by device; said once in the log."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_h2o.errors import UnsupportedError
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.traits import FLOAT8

logger = init_logger("vllm.kv_policy")


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
        return _triton(vllm_config, spec, device, quantised)
    return _cpu(spec, config.kernels, quantised or spec.dtype == model_dtype)


def _check_for_gpu(spec: AttentionSpec, config: KVPolicyConfig, dtype: torch.dtype) -> None:
    if spec.dtype != dtype:
        raise UnsupportedError(
            f"a KV cache of {spec.dtype}",
            f"the model computes in {dtype}",
            "the kernels for GPUs store K and V as they were computed",
            "use --kv-cache-dtype auto",
        )
    if config.kernels != "auto":
        raise UnsupportedError(
            f"kernels={config.kernels!r}",
            "the model runs on a GPU",
            "they compute on a CPU",
            "leave kernels out",
        )
    if config.granularity == "block" and spec.block_size.bit_count() != 1:
        raise UnsupportedError(
            "granularity='block'",
            f"pages of {spec.block_size} tokens",
            "on a GPU pages are summed in powers of two",
            "give a block size of 16, 32, 64 or 128",
        )


def _cpu(spec: AttentionSpec, asked: str, known_dtype: bool) -> Kernels:
    from vllm_h2o.kernels.native import loader
    from vllm_h2o.kernels.native.layout import HEAD_MULTIPLE
    from vllm_h2o.kernels.torch.kernels import TorchKernels

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
    vllm_config: VllmConfig, spec: AttentionSpec, device: torch.device, quantised: bool
) -> Kernels:
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    from vllm_h2o.kernels.triton.kernels import TritonKernels
    from vllm_h2o.worker.flash import FlashPrompt

    # FlashAttention begins with Ampere, has no float32, and pages in multiples of 16. Of a prompt's
    # first chunk it takes K and V as they were computed, and not what float8 leaves of them.
    # What its log-sum-exp is with attention sinks has not been tried: layers that have them do
    # without it, in TritonKernels.
    has_flash = (
        not quantised
        and torch.cuda.get_device_capability(device)[0] >= 8
        and spec.dtype != torch.float32
        and spec.block_size % 16 == 0
        and spec.head_size % 8 == 0
        and spec.head_size <= 256
    )
    version = get_flash_attn_version(head_size=spec.head_size) if has_flash else None
    attention = None
    if version is not None:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        attention = FlashPrompt(flash_attn_varlen_func, version)
    logger.info_once(
        "h2o: Triton kernels on %s; prompts by %s",
        torch.cuda.get_device_name(device),
        f"FlashAttention {version}, but for attention sinks"
        if version is not None
        else "a Triton kernel of our own",
    )
    num_heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
    rows = vllm_config.scheduler_config.max_num_seqs
    shares_pages = bool(vllm_config.cache_config.enable_prefix_caching)
    sizes = (rows, num_heads, spec.num_kv_heads, spec.head_size)
    return TritonKernels(device, *sizes, attention, shares_pages)
