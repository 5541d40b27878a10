# SPDX-License-Identifier: Apache-2.0
"""Names what computes caches, so that files of one engine are told from those of another."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import vllm
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from vllm import envs
from vllm.config import ModelConfig, VllmConfig

import vllm_h2o
from vllm_h2o.errors import ConfigError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.traits import stages

FORMAT = 2
"""Version of the files."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Files of a model's folder that hold weights."""


def made_by(vllm_config: VllmConfig, config: KVPolicyConfig) -> str:
    """Name all that a cache depends on besides tokens and budget, by a hash."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    versions = (FORMAT, vllm_h2o.__version__, vllm.__version__)
    ranks = (parallel.tensor_parallel_size, stages(vllm_config), envs.VLLM_PP_LAYER_PARTITION)
    states = cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype, envs.VLLM_SSM_CONV_STATE_LAYOUT
    layout = (cache.cache_dtype, cache.block_size, *states, *ranks)
    load_format = str(vllm_config.load_config.load_format)
    loaded = load_format, model.seed if load_format == "dummy" else _weights(model)
    everything = (*versions, model.compute_hash(), loaded, layout, config.of_caches)
    return hashlib.sha256(json.dumps(everything, default=str).encode()).hexdigest()


def _weights(model: ModelConfig) -> object:
    """Tell weights apart: local ones by their files' sizes and times, a hub's by their revision."""
    path = Path(model.model)
    if not path.exists():
        return _revision(model)
    found = [f for f in path.iterdir() if f.suffix in WEIGHTS] if path.is_dir() else [path]
    if not found:
        raise _unknown(model)
    return [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(found)]


def _revision(model: ModelConfig) -> str:
    """The folder of a hub's model, which names its revision."""
    try:
        found = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    except HFValidationError:
        found = None
    if isinstance(found, str):
        return found
    raise _unknown(model)


def _unknown(model: ModelConfig) -> ConfigError:
    return ConfigError(
        "a folder for caches",
        f"the weights of {model.model} are neither files here nor of a known revision",
        "caches of other weights would pass for those of these",
        "use a model in a local folder, or keep nothing in files",
    )
