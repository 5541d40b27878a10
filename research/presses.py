# SPDX-License-Identifier: Apache-2.0
"""Run kvpress on the same questions: ``python -m research.presses``, in its own environment.

A press compresses a context once, at its end; forced tokens are added to the survivors. Ada-KV
leaves other tokens in each head, as many on average; kvpress keeps them all and masks those.
The environment: see research/README.md (kvpress needs another transformers than vLLM).
"""

from __future__ import annotations

import argparse
import copy
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.quality.plans import AFTER, FACTS, SHARES_AFTER, slots
from benchmarks.quality.tables import print_table, record, row
from benchmarks.quality.tasks import Task
from benchmarks.smollm2 import model_dir

PRESSES = {
    "ObservedAttention": kvpress.ObservedAttentionPress,
    "SnapKV": kvpress.SnapKVPress,
    "Knorm": kvpress.KnormPress,
    "StreamingLLM": kvpress.StreamingLLMPress,
    "KeyDiff": kvpress.KeyDiffPress,
    "ExpectedAttention": kvpress.ExpectedAttentionPress,
}
MASKING = {
    "Ada-KV, SnapKV": lambda **how: kvpress.AdaKVPress(kvpress.SnapKVPress(**how)),
    "Ada-KV, ExpectedAttention": lambda **how: kvpress.AdaKVPress(
        kvpress.ExpectedAttentionPress(**how)
    ),
    "KVzip": kvpress.KVzipPress,
}
"""Presses that mask; they refuse eager attention, which ObservedAttention needs."""
KVZIP = "KVzip"
"""Masks, too, and has the model repeat the context first: it is given one at a time."""
BATCH = 4
"""Contexts at once: eager attention holds all probabilities of a layer."""


class Zip(kvpress.KVzipPress):  # type: ignore[misc]
    """KVzip, which reads one context again and chooses for several budgets.

    Args:
        wanted: presses of these budgets, by anything.

    """

    def __init__(self, wanted: Mapping[Any, Any]) -> None:
        super().__init__(compression_ratio=0.5)
        self.wanted = wanted
        self.masks: dict[Any, dict[Any, Any]] = {key: {} for key in wanted}

    def compress_post(self, model: Any) -> None:
        """Choose for each budget, and leave the model as it was."""
        for key, press in self.wanted.items():
            self.compression_ratio = press.compression_ratio
            super().compress_post(model)
            for layer in model.model.layers:
                self.masks[key][layer.self_attn] = layer.self_attn.masked_key_indices
                layer.self_attn.masked_key_indices = None


class Several(kvpress.BasePress):  # type: ignore[misc]
    """Lets several presses compress the cache of one forward pass, each for itself.

    Args:
        presses: by name and how many tokens each leaves.

    """

    def __init__(self, presses: Mapping[Any, Any]) -> None:
        self.zips = {key: press for key, press in presses.items() if key[0] == KVZIP}
        self.presses = {key: press for key, press in presses.items() if key[0] != KVZIP}
        self.caches = {key: DynamicCache() for key in presses}
        self.masks: dict[Any, dict[Any, Any]] = {key: {} for key in presses}

    def post_init_from_model(self, model: Any) -> None:
        """Show each press the model."""
        for press in self.presses.values():
            press.post_init_from_model(model)

    def compress(
        self, module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep what each press leaves of a layer, and leave the layer as it is."""
        for key, press in self.presses.items():
            left = press.compress(module, hidden, keys, values, attentions, kwargs)
            self.caches[key].update(*left, module.layer_idx)
            if module.masked_key_indices is not None:
                self.masks[key][module] = module.masked_key_indices
                module.masked_key_indices = None
        return keys, values

    def left(self, key: Any) -> set[int]:
        """How many tokens a press left, by layer, on average over heads and contexts."""
        found = []
        masked = [len(mask[0]) for mask in self.masks[key].values()]
        for number, layer in enumerate(self.caches[key].layers):
            batch, heads, length, _ = layer.keys.shape
            found.append(length - (masked[number] / (batch * heads) if masked else 0))
        if key[0] == KVZIP:  # some layers keep more than others
            return {int(sum(found) / len(found))}
        return set(map(int, found))

    def repeat(self, model: Any, context: torch.Tensor, cache: DynamicCache) -> None:
        """Let KVzip mask tokens of each context, in copies of the cache of all."""
        if not self.zips:
            return
        masks: dict[Any, dict[Any, list[Any]]] = {key: defaultdict(list) for key in self.zips}
        for index, ids in enumerate(context):
            press = Zip(self.zips)
            with press(model):
                model.model(input_ids=ids[None], past_key_values=DynamicCache())
            for key, chosen in press.masks.items():
                for module, (_, heads, places) in chosen.items():
                    masks[key][module].append((torch.full_like(heads, index), heads, places))
        for key, by_module in masks.items():
            self.caches[key] = copy.deepcopy(cache)
            self.masks[key] = {
                module: tuple(map(torch.cat, zip(*rows, strict=True)))
                for module, rows in by_module.items()
            }

    def go_on(self, model: Any, key: Any, tail: torch.Tensor, position: torch.Tensor) -> Any:
        """[B, S, V] logits of a tail's tokens, from what a press left."""
        how = {"past_key_values": self.caches[key]}
        if not self.masks[key]:
            return model(tail, position_ids=position, **how).logits
        for module, mask in self.masks[key].items():
            module.masked_key_indices = mask
        # A key that no query of a call sees has to be found: one token at a time makes it sure.
        steps = zip(tail.split(1, 1), position.split(1, 1), strict=True)
        logits = [model(token, position_ids=at, **how).logits for token, at in steps]
        for module in self.masks[key]:
            module.masked_key_indices = None
        return torch.cat(logits, 1)


Wanted = tuple[str, int]
"""A press, and how many tokens it leaves; ``("full", length)`` leaves all."""


@torch.no_grad()
def judge(model: Any, wanted: Sequence[Wanted], task: Task) -> dict[Wanted, list[float]]:
    """The figures of a task, by press and tokens left of each context.

    Args:
        model: of transformers, with eager attention but for presses that mask.
        wanted: what to compare.
        task: contexts and tails.

    """
    length, size = task.context.shape[1], task.tail.shape[1]
    nats: dict[Wanted, list[torch.Tensor]] = {key: [] for key in wanted}
    first: dict[Wanted, list[torch.Tensor]] = {key: [] for key in wanted}
    for context, tail in zip(task.context.split(BATCH), task.tail.split(BATCH), strict=True):
        # int(n * (1 - ratio)) tokens stay: the half keeps rounding from taking one.
        several = Several(
            {
                (name, kept): {**PRESSES, **MASKING}[name](
                    compression_ratio=1 - (kept + 0.5) / length
                )
                for name, kept in wanted
                if name != "full"
            }
        )
        cache = DynamicCache()
        with several(model):
            guess = model(context, past_key_values=cache, logits_to_keep=1).logits
        several.repeat(model, context, cache)
        position = torch.arange(length, length + size - 1).expand(len(tail), -1)
        for key in wanted:
            if key[0] == "full":
                rest = model(tail[:, :-1], past_key_values=cache, position_ids=position).logits
            else:
                if several.left(key) != {key[1]}:
                    raise RuntimeError(f"{key[0]} did not leave {key[1]} of {length} tokens")
                rest = several.go_on(model, key, tail[:, :-1], position)
            logits = torch.cat([guess, rest], 1)
            loss = torch.nn.functional.cross_entropy(logits.mT, tail, reduction="none")
            nats[key].append(loss)
            first[key].append(logits.argmax(-1) == tail)
    return {key: task.figures(torch.cat(nats[key]), torch.cat(first[key]), 0) for key in wanted}


def main() -> None:
    """Compare, print the table and append to the CSV."""
    parser = argparse.ArgumentParser(prog="python -m research.presses", description=__doc__)
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    parser.add_argument("--facts", nargs="*", default=[], choices=FACTS, help="instead of the rest")
    parser.add_argument(
        "--masking", action="store_true", help="Ada-KV and KVzip, instead of the rest"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = model_dir("float32")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="sdpa" if args.masking else "eager",
    )
    # KVzip reads the tokenizer there, and would take a context's start for a chat's.
    plain = tempfile.TemporaryDirectory()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(folder / name, plain.name)
    model.config.name_or_path = plain.name
    presses = MASKING if args.masking else PRESSES
    by, rows = f"kvpress {version('kvpress')}", []
    asked = [(FACTS[name].make, FACTS[name].shares) for name in args.facts]
    for make, given in asked or [(make, SHARES_AFTER) for make in AFTER]:
        task = make(tokenizer)
        shares = {slots(share, task.length): share for share in given}
        full = ("full", task.length)
        wanted = [full, *((name, kept) for name in presses for kept in shares)]
        figures = judge(model, wanted, task)
        for key in wanted:
            share = shares.get(key[1], 1.0)
            found = row(by, task, key[0], share, key[1], figures[key], figures[full])
            rows.append(record(found, args.csv))
    print_table(rows)


if __name__ == "__main__":
    main()
