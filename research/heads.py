# SPDX-License-Identifier: Apache-2.0
"""Give a model a KV head for each query head: ``python -m research.heads FOLDER``.

In a Llama whose query heads share KV heads, K and V are repeated for each query head, as attention
itself would. The model's output is the same; but each query head now evicts for itself, as in
models without groups. So a trained model shows how groups change a policy's quality.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from benchmarks.smollm2 import DTYPES, MODEL, model_dir

WEIGHTS = "model.safetensors"


def ungrouped(source: Path, target: Path) -> Path:
    """Write the model to another folder.

    Args:
        source: of a Llama without biases, in one file of weights.
        target: made; must not be there.

    Returns:
        ``target``.

    """
    config = json.loads((source / "config.json").read_text())
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shutil.copytree(source, target)
    weights = load_file(source / WEIGHTS)
    for name, weight in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            heads = weight.unflatten(0, (num_kv_heads, -1))
            each = heads.repeat_interleave(num_heads // num_kv_heads, dim=0)
            weights[name] = each.flatten(0, 1).contiguous()
    save_file(weights, target / WEIGHTS, metadata={"format": "pt"})
    config["num_key_value_heads"] = num_heads
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return target


def main() -> None:
    """Write SmolLM2 so."""
    parser = argparse.ArgumentParser(prog="python -m research.heads", description=__doc__)
    parser.add_argument("folder", type=Path, help=f"{MODEL}-ungrouped is written there")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    args = parser.parse_args()
    print(ungrouped(model_dir(args.dtype), args.folder / f"{MODEL}-ungrouped"))


if __name__ == "__main__":
    main()
