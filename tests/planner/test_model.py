# SPDX-License-Identifier: Apache-2.0
"""The planner reads a config like vLLM, and refuses models like the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PretrainedConfig
from vllm.config.model import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from tests.e2e.zoo import FAMILIES, architecture_of
from tests.tiny_models import CONFIGS, engine_config, folder
from vllm_h2o.errors import UnsupportedError
from vllm_h2o.options.refusals import MODEL_REFUSALS
from vllm_h2o.planner.model import load

try:
    from vllm.v1.core.kv_cache_planning import _get_kv_cache_groups_uniform_page_size
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size

_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
SHAPES: list[PretrainedConfig] = [
    transformers.LlamaConfig(**_SMALL, num_key_value_heads=2, head_dim=24),
    transformers.Qwen3Config(**_SMALL, num_key_value_heads=1, head_dim=32),
    transformers.Qwen2Config(**_SMALL, num_key_value_heads=2, use_sliding_window=False),
    transformers.MixtralConfig(**_SMALL, num_key_value_heads=2, sliding_window=None),
    transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, n_positions=128),
    transformers.GPTNeoXConfig(**_SMALL),
    transformers.OPTConfig(**_SMALL, word_embed_proj_dim=64),
    transformers.FalconConfig(**_SMALL, multi_query=True),
    transformers.FalconConfig(**_SMALL, new_decoder_architecture=True, num_kv_heads=2),
    transformers.GPTBigCodeConfig(n_embd=64, n_layer=2, n_head=4, multi_query=True),
]


@pytest.mark.parametrize("config", SHAPES, ids=lambda config: type(config).__name__)
def test_model_reads_shapes_like_vllm(config: PretrainedConfig, tmp_path: Path) -> None:
    """Layers, KV heads, head size and the longest sequence."""
    config.architectures = ["SomeForCausalLM"]
    config.save_pretrained(tmp_path)
    kind = MODEL_ARCH_CONFIG_CONVERTORS.get(config.model_type, ModelArchConfigConvertorBase)
    vllm = kind(config, config.get_text_config()).convert()
    model = load(str(tmp_path))
    model.refuse()
    cache = model.cache("auto")
    assert cache.num_layers == vllm.total_num_hidden_layers
    assert cache.num_kv_heads == vllm.total_num_kv_heads
    assert cache.head_size == vllm.head_size
    length, _ = vllm.derived_max_model_len_and_key
    assert model.max_len in (length, None)
    assert model.parameter_bytes() > 0


@pytest.mark.parametrize("architecture", CONFIGS)
def test_model_is_refused_like_in_the_engine(
    architecture: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With the same reason, from the config alone."""
    path = folder(tmp_path_factory.mktemp("models"), architecture)
    try:
        engine_config(path, kv_policy="h2o", kv_policy_config={"budget": 64})
        why = None
    except UnsupportedError as refused:
        why = refused.why
    try:
        load(path).refuse()
    except UnsupportedError as refused:
        assert refused.why == why
        assert architecture in refused.asked
    else:
        assert why is None


@pytest.mark.parametrize(
    ("full", "sliding"),
    [(1, 5), (2, 4), (10, 52), (12, 12), (12, 13), (4, 9), (5, 1), (7, 5), (3, 2)],
)
def test_model_groups_layers_like_vllm(full: int, sliding: int, tmp_path: Path) -> None:
    """Several groups of full attention are refused."""
    kinds = ["full_attention"] * full + ["sliding_attention"] * sliding
    config = transformers.Gemma3TextConfig(
        **{**_SMALL, "num_hidden_layers": len(kinds)}, layer_types=kinds, sliding_window=16
    )
    config.architectures = ["Gemma3ForCausalLM"]
    config.save_pretrained(tmp_path)
    model = load(str(tmp_path))
    shape: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 8}
    specs = [FullAttentionSpec(**shape, dtype=torch.float32)] * full
    specs += [SlidingWindowSpec(**shape, dtype=torch.float32, sliding_window=16)] * sliding
    groups = _get_kv_cache_groups_uniform_page_size(dict(enumerate(specs)))
    of_full = [group for group in groups if isinstance(group.kv_cache_spec, FullAttentionSpec)]
    assert model.num_groups == len(groups)
    assert model.num_group_layers == max(len(group.layer_names) for group in groups)
    if len(of_full) == 1:
        model.refuse()
        assert model.cache("auto").windows == (16,) * (len(groups) - 1)
        return
    with pytest.raises(UnsupportedError, match=f"its {full} layers with full attention form"):
        model.refuse()


def _untried_multimodal() -> str:
    (what,) = [refusal.what for refusal in MODEL_REFUSALS if "a multimodal" in refusal.what]
    return what


def test_model_is_refused_with_its_reason(tmp_path: Path) -> None:
    """A pooling model, one without attention and multimodal ones."""
    text = {**_SMALL, "num_key_value_heads": 2}
    configs = {
        "a pooling model": transformers.BertConfig(architectures=["BertModel"], **_SMALL),
        "an attention-free (state-space) model": transformers.MambaConfig(
            architectures=["MambaForCausalLM"], num_hidden_layers=2
        ),
        _untried_multimodal(): transformers.Qwen2AudioConfig(
            architectures=["Qwen2AudioForConditionalGeneration"],
            text_config=transformers.Qwen2Config(**text),
        ),
        "attention in both directions within an image": transformers.Gemma3Config(
            architectures=["Gemma3ForConditionalGeneration"],
            text_config=transformers.Gemma3TextConfig(**text),
        ),
    }
    for what, config in configs.items():
        assert what in {refusal.what for refusal in MODEL_REFUSALS}
        config.save_pretrained(tmp_path / config.model_type)
        with pytest.raises(UnsupportedError) as caught:
            load(str(tmp_path / config.model_type)).refuse()
        assert caught.value.found == f"the model has or is {what}"
    llava = transformers.LlavaConfig(
        architectures=["LlavaForConditionalGeneration"],
        text_config=transformers.LlamaConfig(**text),
    )
    llava.save_pretrained(tmp_path / "llava")
    load(str(tmp_path / "llava")).refuse()
    load(str(tmp_path / "qwen2_audio"), text_only=True).refuse()


@pytest.mark.parametrize(
    "name", ["Granite 4 H", "Falcon-H1", "Nemotron-H", "Zamba2", "LFM2", "Qwen3-Next"]
)
def test_model_counts_states_like_vllm(name: str, tmp_path: Path) -> None:
    """Layers with attention and with states, in the words of each family's config."""
    (family,) = [family for family in FAMILIES if family.name == name]
    config = family.config()
    config.architectures = [architecture_of(config)]
    config.save_pretrained(tmp_path)
    model = load(str(tmp_path))
    model.refuse()
    found = {"Falcon-H1": (2, 2), "Nemotron-H": (1, 2), "Zamba2": (1, 4)}
    assert (model.num_layers, model.num_states) == found.get(name, (1, 3))
    assert model.state_bytes() > 0


@pytest.mark.parametrize(
    ("written", "dtype", "element_size"),
    [("bfloat16", "bfloat16", 2), ("float16", "float16", 2), ("float32", "bfloat16", 2)],
)
def test_dtype_auto_is_never_float32(
    written: str, dtype: str, element_size: int, tmp_path: Path
) -> None:
    """The cache has the model's dtype by default."""
    transformers.LlamaConfig(**_SMALL, dtype=written).save_pretrained(tmp_path)
    model = load(str(tmp_path))
    assert model.dtype == dtype
    assert model.cache("auto").element_size == element_size
    assert model.cache("float32").element_size == 4
    assert model.cache("fp8").element_size == 1
    assert load(str(tmp_path), "float32").cache("auto").element_size == 4


def test_load_without_a_config_is_refused(tmp_path: Path) -> None:
    """An empty folder."""
    with pytest.raises(UnsupportedError, match="Give a folder with a config.json"):
        load(str(tmp_path))


def test_parameter_bytes_of_quantised_weights_are_refused(tmp_path: Path) -> None:
    """The config does not give their size."""
    quantised = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    config = transformers.LlamaConfig(**_SMALL, quantization_config=quantised)
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="the weights are quantised.*Give the memory"):
        load(str(tmp_path)).parameter_bytes()
