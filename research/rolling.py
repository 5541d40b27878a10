# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of renumbering seldom: ``python -m research.rolling``.

A Llama in plain torch, with a reference for each of its KV heads, reads a text three times. It
renumbers positions when they run out, as the engine does; before every step, as StreamingLLM does;
and never.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.quality.forced import BLOCK_SIZE
from benchmarks.quality.llama import Llama
from benchmarks.record import append_rows, machine_name
from benchmarks.smollm2 import MODEL, model_dir
from research.streams import VARIANTS, text
from vllm_h2o.kernels.reference import Head, Rolling
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.options.config import KVPolicyConfig

POSITIONS = ("exact", "rolling", "original")
"""Renumbered before every step; when they run out; never."""


class Reader:
    """A Llama that reads one text, with references for its KV heads.

    Args:
        model: the model.
        like: a head with the settings of all; its strip is not used.
        at_every_step: renumber before every step, not only when positions run out.

    """

    def __init__(self, model: Llama, like: Head, at_every_step: bool = False) -> None:
        fields = (name for name in like.__dataclass_fields__ if name != "strip")
        make = partial(type(like), **{name: getattr(like, name) for name in fields})
        self.model, self.at_every_step = model, at_every_step
        self.layers = [
            [
                make(strip=Strip.empty(model.head_size, torch.float32))
                for _ in range(model.num_kv_heads)
            ]
            for _ in range(model.num_layers)
        ]

    def step(self, tokens: Sequence[int], ends_prompt: bool = False) -> torch.Tensor:
        """[1, T, hidden] of a chunk of the prompt, or of a token after it."""
        model, x = self.model, self.model.embed(torch.tensor([tokens]))
        for index, heads in enumerate(self.layers):
            (start,) = {self._make_room(head, len(tokens)) for head in heads}
            query, key, value = model.qkv(index, x, start)
            attended = [
                head.step(query[0, i].transpose(0, 1), key[0, i], value[0, i], ends_prompt)
                for i, head in enumerate(heads)
            ]
            x = model.finish(index, x, torch.stack([a.transpose(0, 1) for a in attended])[None])
        return x

    def _make_room(self, head: Head, num_new: int) -> int:
        """Renumber a head if it is time to. Returns the position of its next token."""
        if self.at_every_step and head.rolling is not None:
            if head.victim is not None:  # it has no position in StreamingLLM
                rest = (slot for slot in range(len(head.strip)) if slot != head.victim)
                head.strip, head.victim = head.strip.taken([*rest]), None
            head.renumber(head.rolling)
        return head.make_room(num_new)


def rotated_back(model: Llama, key: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """[L, D], each at so many positions, [L], earlier."""
    return model.turn(key, -distance)


@torch.no_grad()
def nll(reader: Reader, tokens: Sequence[int], chunk: int, prompt: int) -> torch.Tensor:
    """Judge each token but the first: [T - 1] nats.

    Args:
        reader: a new one.
        tokens: [T].
        chunk: tokens of a step, in the prompt.
        prompt: tokens of the prompt; later ones are given one by one.

    """
    costs = []
    starts = [*range(0, prompt, chunk), *range(prompt, len(tokens) - 1)]
    for start, end in zip(starts, [*starts[1:], len(tokens) - 1], strict=True):
        x = reader.step(tokens[start:end], end == prompt)
        following = torch.tensor([tokens[start + 1 : end + 1]])
        costs.append(reader.model.nll(x, following)[0])
    return torch.cat(costs)


def head_of(model: Llama, name: str, cache: int, length: int, limit: int, positions: str) -> Head:
    """Make a reference for one of :data:`research.streams.VARIANTS`."""
    policy, options = VARIANTS[name]
    config = KVPolicyConfig(name=policy, budget=cache, eviction="chunk", **options)
    return Head(
        Strip.empty(model.head_size, torch.float32),
        config.resolve(length, BLOCK_SIZE),
        config.ranking,
        config.schedule,
        model.scale,
        rolling=None if positions == "original" else Rolling(limit, partial(rotated_back, model)),
    )


def rows(model: Llama, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each way to count, compared with renumbering before every step."""
    tokenizer = Tokenizer.from_file(str(model_dir("float32") / "tokenizer.json"))
    tokens = text(tokenizer, arguments.tokens + 1)
    prompt = arguments.prompt or arguments.tokens
    for name in arguments.policies:
        exact = None
        for positions in arguments.positions:
            shape = (arguments.cache, len(tokens), arguments.limit, positions)
            reader = Reader(model, head_of(model, name, *shape), positions == "exact")
            # Before anything is evicted all are the same.
            costs = nll(reader, tokens, arguments.chunk, prompt)[arguments.cache :]
            exact = costs if exact is None else exact
            delta = costs - exact
            yield {
                "machine": machine_name(),
                "by": "plain torch, float32",
                "model": MODEL,
                "policy": name,
                "cache": arguments.cache,
                "chunk": arguments.chunk,
                "prompt": prompt,
                "position_limit": "" if positions == "original" else arguments.limit,
                "tokens": len(costs),
                "positions": positions,
                "nll": round(float(costs.mean()), 4),
                "more_than_exact": round(float(delta.mean()), 4),
                "standard_error": round(float(delta.std() / len(delta) ** 0.5), 4),
            }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--policies", nargs="+", choices=VARIANTS, default=["streaming", "h2o"])
    parser.add_argument("--cache", type=int, default=1024, help="slots")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a step")
    parser.add_argument("--limit", type=int, default=2048, help="positions")
    parser.add_argument("--prompt", type=int, help="tokens that are read by chunks; all by default")
    parser.add_argument("--positions", nargs="+", choices=POSITIONS, default=list(POSITIONS))
    parser.add_argument("--csv", type=Path)
    return parser.parse_args(argv)


def main() -> None:
    """Run what is asked for."""
    arguments = parse()
    for row in rows(Llama(model_dir("float32")), arguments):
        print(*(f"{key}={value}" for key, value in list(row.items())[3:]), flush=True)
        if arguments.csv:
            append_rows(arguments.csv, [row])


if __name__ == "__main__":
    main()
