# SPDX-License-Identifier: Apache-2.0
"""Measure the attention that an eviction leaves in reach: ``python -m research.simulation.mass``.

Queries and keys are those of the model with its full cache. Each policy evicts from them, and its
slots are compared, query by query, with the best set of the same size: the slots that this query
attends to most. No policy can know that set before the query comes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.quality import tasks
from benchmarks.quality.llama import Llama
from benchmarks.quality.plans import slots
from benchmarks.record import append_rows, machine_name
from benchmarks.smollm2 import MODEL, model_dir
from research.simulation.search import NAMES
from research.simulation.simulate import ask_again, attend_layer
from research.simulation.variants import BUILT, Variant

LENGTH, PROMPT, SHARES = 1024, 256, (0.05, 0.1, 0.2)


def retained(
    full: torch.Tensor,
    variant: Variant,
    capacity: int,
    logits: torch.Tensor,
    key: torch.Tensor,
    again: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares of the attention behind the prompt that a policy holds, and that the best set would.

    Args:
        full: [W, H, G, T, T] probabilities with the full cache.
        variant: what stays.
        capacity: slots.
        logits: [W, H, G, T, T], overwritten.
        key: [W, H, T, D].
        again: [W, H, G, n, n], of the prompt: see :func:`ask_again`.

    Returns:
        [H] each, means over windows, queries and the GQA group.

    """
    given = again if variant.replay else None
    held = attend_layer(variant, capacity, PROMPT, logits, key, given)[..., PROMPT:, :] > 0
    asked = full[..., PROMPT:, :]
    mine = (asked * held).sum(-1).mean((0, 2, 3))
    best = asked.mean(2).topk(capacity, dim=-1).values.sum(-1).mean((0, 2))
    return mine, best


@torch.no_grad()
def figures(model: Llama, ids: torch.Tensor) -> Iterator[dict[str, Any]]:
    """One row for each layer, KV head, policy and budget."""
    x = model.embed(ids)
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    for layer in range(model.num_layers):
        query, key, value = model.qkv(layer, x, 0)
        logits = torch.matmul((query * model.scale).flatten(2, 3), key.transpose(2, 3))
        logits = logits.unflatten(2, query.shape[2:4])
        full = logits.masked_fill(causal, -torch.inf).softmax(-1)
        again = ask_again(model, query[..., :PROMPT, :], key[:, :, :PROMPT])
        for variant in BUILT:
            for share in SHARES:
                capacity = slots(share, LENGTH)
                torch.manual_seed(0)
                mine, best = retained(full, variant, capacity, logits.clone(), key, again)
                for head in range(model.num_kv_heads):
                    yield {
                        "policy": variant.name,
                        "share": share,
                        "slots": capacity,
                        "layer": layer,
                        "kv_head": head,
                        "retained": round(float(mine[head]), 4),
                        "best": round(float(best[head]), 4),
                    }
        x = model.finish(layer, x, torch.matmul(full.flatten(2, 3), value).view_as(query))


def main() -> None:
    """Measure, print means and worst heads, and append to the CSV."""
    parser = argparse.ArgumentParser(prog="python -m research.simulation.mass", description=__doc__)
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = model_dir("float32")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    task = tasks.prose(tokenizer, NAMES, 1, LENGTH, LENGTH - PROMPT)
    same = {
        "machine": machine_name(),
        "by": f"simulation, torch {version('torch')}",
        "model": MODEL,
        "length": LENGTH,
        "windows": len(task.context),
    }
    rows = [same | row for row in figures(Llama(folder), torch.cat([task.context, task.tail], 1))]
    if args.csv:
        append_rows(args.csv, rows)
    for variant in BUILT:
        for share in SHARES:
            mine = [r for r in rows if (r["policy"], r["share"]) == (variant.name, share)]
            parts = [r["retained"] / r["best"] for r in mine]
            print(
                f"{variant.name:20} {share:5}: {sum(r['retained'] for r in mine) / len(mine):.3f} "
                f"of all attention, best set {sum(r['best'] for r in mine) / len(mine):.3f}; "
                f"of the best set {sum(parts) / len(parts):.3f}, worst head {min(parts):.3f}"
            )


if __name__ == "__main__":
    main()
