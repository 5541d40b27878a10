# SPDX-License-Identifier: Apache-2.0
"""Adapters of random weights, one of which is loaded again in place while others are asked.

Every request names one: beside requests with an adapter, on a CPU, vLLM 0.32 gives it to those
without, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RANK = 4
STEADY, SWAPPED = "steady", "swapped"
"""Names of the adapter that everybody uses, and of the one whose weights change."""
VERSIONS = ("swapped to the first", "swapped to the second")
"""Names of the canaries of the latter, by its weights."""


def write_adapters(model: Path, folder: Path) -> dict[str, str]:
    """Write adapters for a Llama: the folder of each, by :data:`STEADY` or its version.

    Args:
        model: folder of the model.
        folder: takes a folder for each.

    """
    config = json.loads((model / "config.json").read_text())
    names = {STEADY: 1, **{version: seed for seed, version in enumerate(VERSIONS, 2)}}
    return {name: _write(config, folder / f"adapter{seed}", seed) for name, seed in names.items()}


def _write(config: Mapping[str, Any], folder: Path, seed: int) -> str:
    """Random low-rank changes of every projection of attention, as PEFT writes them."""
    import torch
    from safetensors.torch import save_file

    hidden = config["hidden_size"]
    kv = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    shapes = {"q_proj": hidden, "k_proj": kv, "v_proj": kv, "o_proj": hidden}
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size_out in shapes.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(RANK, hidden, generator=generator) * 0.15
            up = torch.randn(size_out, RANK, generator=generator) * 0.15
            weights |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    own = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(shapes)}
    (folder / "adapter_config.json").write_text(json.dumps(own))
    return str(folder)
