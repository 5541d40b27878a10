# SPDX-License-Identifier: Apache-2.0
"""Models: the demo's, and shapes of larger ones with random weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CACHE = Path.home() / ".cache" / "vllm-h2o" / "shapes"
OPT_6_7B = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 50272,
    "hidden_size": 4096,
    "word_embed_proj_dim": 4096,
    "ffn_dim": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float16",
}
OPT_30B = OPT_6_7B | {
    "hidden_size": 7168,
    "word_embed_proj_dim": 7168,
    "ffn_dim": 28672,
    "num_hidden_layers": 48,
    "num_attention_heads": 56,
    "max_position_embeddings": 8192,  # the paper's longest sequence; OPT's own are of 2,048
}
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Model:
    """A model for an engine.

    Args:
        config: of a shape that is made here; None for the demo's model.
        bytes_per_slot: of K and V of one token in one layer and KV head.
        dtype: of the demo's model.

    """

    config: dict[str, Any] | None
    bytes_per_slot: int
    dtype: str = "bfloat16"


MODELS = {
    "smollm2": Model(None, 2 * 64 * 2),
    "smollm2-float32": Model(None, 2 * 64 * 4, "float32"),
    "opt-6.7b": Model(OPT_6_7B, 2 * 128 * 2),
    "opt-6.7b-long": Model(OPT_6_7B | {"max_position_embeddings": 8192}, 2 * 128 * 2),
    "opt-30b": Model(OPT_30B, 2 * 128 * 2),
    "llama-8b": Model(LLAMA_8B, 2 * 128 * 2),
}


def folder_of(name: str, has_bfloat16: bool = True) -> tuple[Path, list[str]]:
    """The model's folder, made when it is missing, and the options that it wants.

    Args:
        name: of :data:`MODELS`.
        has_bfloat16: whether the device has it; where not, shapes take float16.

    """
    model = MODELS[name]
    if model.config is None:
        from benchmarks.smollm2 import model_dir

        return model_dir(model.dtype), ["--dtype", model.dtype]
    folder = CACHE / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config))
    write_tokenizer(folder, model.config["vocab_size"])
    dtype = model.config["torch_dtype"] if has_bfloat16 else "float16"
    return folder, ["--load-format", "dummy", "--dtype", dtype]


def write_random(config: PretrainedConfig, folder: Path, std: float = 0.15) -> str:
    """A model of random weights, by default so wide that its first choices are clear.

    Args:
        config: of any model for text.
        folder: where it goes.
        std: of the weights.

    Returns:
        The folder.

    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(folder)
    return str(folder)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A word for each token, so that random prompts keep their length through text and back."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # No special token may be the beginning of a word: it would be split off.
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", bos_token="<s>"
    ).save_pretrained(folder)


def write_sparse(config: PretrainedConfig, folder: Path, zeros: float, std: float = 0.02) -> str:
    """An OPT of random weights whose ReLU sets a share of the neurons to zero.

    fc1 gets what a layer norm gives, of variance 1, so its output is normal before the bias.

    Args:
        config: of an OPT.
        folder: where it goes.
        zeros: the share, in (0, 1).
        std: of the weights.

    Returns:
        The folder.

    """
    from statistics import NormalDist

    from safetensors.torch import load_file, save_file

    write_random(config, folder, std)
    path = folder / "model.safetensors"
    weights = load_file(path)
    spread = std * config.hidden_size**0.5
    for name, weight in weights.items():
        if name.endswith("fc1.bias"):
            weight.fill_(-NormalDist().inv_cdf(zeros) * spread)
    save_file(weights, path, {"format": "pt"})
    return str(folder)
