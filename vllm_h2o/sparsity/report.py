# SPDX-License-Identifier: Apache-2.0
"""Measure on a text which neurons a model uses, and what skipping the others saves and costs.

The model runs in transformers; the kernels are those of an engine on a CPU. The text is cut into
32 sequences, and a batch is as many tokens of different sequences at one position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vllm_h2o.errors import SparsityError
from vllm_h2o.kernels.coarse import Coarse, coarsen, kept
from vllm_h2o.sparsity.config import MODES, MOST_TOKENS, SparsityConfig
from vllm_h2o.sparsity.hooks import check_model
from vllm_h2o.sparsity.ops import kernels_of

BATCHES = (1, 4, 8, 16, 32)
SEQUENCES, LENGTH = 32, 64

Computed = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor | None]
"""Name of a linear layer, its input and its output -> another output, or None."""


@dataclass(frozen=True)
class Layer:
    """Shares of a layer's neurons.

    Args:
        zeros: neurons that a token does not use.
        recall: used neurons that the prediction keeps.
        used: by the number of tokens, rows of fc2 that ``exact`` reads.
        predicted: the same of ``predicted``.
        kept: by the number of tokens, rows of fc1 that ``predicted`` reads.

    """

    zeros: float
    recall: float
    used: dict[int, float]
    predicted: dict[int, float]
    kept: dict[int, float]

    def shares(self) -> list[float]:
        """Return a row of the table: zeros, recall, then ``used`` and ``kept``."""
        return [self.zeros, self.recall, *self.used.values(), *self.kept.values()]


@dataclass(frozen=True)
class Report:
    """Figures of one model on one text.

    Args:
        layers: from the first to the last.
        nll: mean negative log-likelihood of a token by mode, in nats; ``dense`` reads every row.
        bytes: by mode and number of tokens, weights that a step reads.

    """

    layers: list[Layer]
    nll: dict[str, float]
    bytes: dict[str, dict[int, float]]

    def text(self) -> str:
        """Return the tables that the command prints."""
        heads = [f"{name} {b}" for name in ("used", "kept") for b in BATCHES]
        lines = ["layer  zeros  recall " + "".join(f"{head:>9}" for head in heads)]
        table = [layer.shares() for layer in self.layers]
        means = [sum(column) / len(table) for column in zip(*table, strict=True)]
        for name, row in [*((str(i), row) for i, row in enumerate(table)), ("mean", means)]:
            shares = "".join(f"{share:9.3f}" for share in row[2:])
            lines.append(f"{name:<6} {row[0]:.3f}  {row[1]:.4f} {shares}")
        lines += ["", "used N, kept N: rows of fc2 and fc1 that N tokens of a step use and keep"]
        dense = self.nll["dense"]
        lines += ["", f"negative log-likelihood of a token: {dense:.4f}, every row read"]
        lines += [f"{mode:>10}: {self.nll[mode] - dense:+.4f}" for mode in MODES]
        lines += ["", "MB of weights a step" + "".join(f"{b:>9}" for b in BATCHES) + "  tokens"]
        for mode, read in self.bytes.items():
            lines.append(f"{mode:>20}" + "".join(f"{read[b] / 1e6:9.1f}" for b in BATCHES))
        return "\n".join(lines)


def measure(model: str, text: str, recall: float) -> Report:
    """Run a model on a text.

    Args:
        model: a folder or a name, as for transformers: an OPT with ReLU.
        text: of 2,016 tokens at least.
        recall: share of the used neurons that ``predicted`` asks for.

    Raises:
        SparsityError: for another model, or a shorter text.

    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    check_model(AutoConfig.from_pretrained(model).to_dict(), "predicted")
    ids = _sequences(AutoTokenizer.from_pretrained(model), text)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    linear = {
        name: module
        for name, module in loaded.named_modules()
        if name.endswith((".fc1", ".fc2")) and isinstance(module, torch.nn.Linear)
    }
    copies = {
        name: coarsen(module.weight.data, module.bias, recall)
        for name, module in linear.items()
        if name.endswith(".fc1")
    }
    layers: list[Layer] = []

    def watch(name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        if name in copies:
            keeps = kept(x, linear[name].bias, copies[name])[:, : y.shape[1]]
            layers.append(_layer(y > 0, keeps))

    nll = {"dense": _nll(loaded, ids, linear, watch)}
    for mode, prediction in (("exact", {}), ("predicted", copies)):
        nll[mode] = _nll(loaded, ids, linear, _skipping(linear, prediction))
    return Report(layers, nll, _bytes(loaded, linear, copies, layers))


def _sequences(tokenizer: Any, text: str) -> torch.Tensor:
    """Return token ids [32, 64], spread over the text evenly, each after the token of a start."""
    found = tokenizer(text, add_special_tokens=False).input_ids
    size = LENGTH - 1
    stride = len(found) // SEQUENCES
    if stride < size:
        raise SparsityError(
            "the text",
            f"it has {len(found)} tokens",
            f"{SEQUENCES} sequences of {size} tokens are cut from it",
            f"give a text of {SEQUENCES * size} tokens at least",
        )
    start = [tokenizer.bos_token_id]
    return torch.tensor([start + found[i * stride : i * stride + size] for i in range(SEQUENCES)])


@contextmanager
def _hooked(linear: dict[str, torch.nn.Linear], computed: Computed) -> Iterator[None]:
    """Call a function with what each linear layer computes, by tokens: [tokens, width]."""

    def hook(name: str) -> Callable[..., torch.Tensor | None]:
        def called(module: Any, given: Any, out: torch.Tensor) -> torch.Tensor | None:
            instead = computed(name, given[0].flatten(0, -2), out.flatten(0, -2))
            return None if instead is None else instead.view(out.shape)

        return called

    handles = [module.register_forward_hook(hook(name)) for name, module in linear.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _nll(
    model: Any, ids: torch.Tensor, linear: dict[str, torch.nn.Linear], computed: Computed
) -> float:
    """Return the mean over all tokens but the first ones, in nats."""
    with _hooked(linear, computed):
        logits = model(input_ids=ids).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()


def _skipping(linear: dict[str, torch.nn.Linear], copies: dict[str, Coarse]) -> Computed:
    """Compute fc2, and fc1 where it has a copy, as an engine does."""
    kernels, counts = kernels_of("cpu"), torch.zeros(2, dtype=torch.int64)
    down = {name: m.weight.data.t().contiguous() for name, m in linear.items() if "fc2" in name}

    def computed(name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        bias, steps = linear[name].bias, x.contiguous().split(MOST_TOKENS)
        if name in down:
            return torch.cat([kernels.down(step, down[name], bias, counts) for step in steps])
        if name not in copies:
            return None
        rows, copy = linear[name].weight, copies[name]
        return torch.cat([kernels.up(step, rows, bias, copy, counts) for step in steps])

    return computed


def _layer(used: torch.Tensor, keeps: torch.Tensor) -> Layer:
    """Return the shares of booleans [tokens, neurons], which neurons are used and kept."""

    def unions(which: torch.Tensor) -> dict[int, float]:
        by_position = which.view(SEQUENCES, LENGTH, -1).transpose(0, 1)
        return {
            b: by_position.reshape(LENGTH, SEQUENCES // b, b, -1).any(2).float().mean().item()
            for b in BATCHES
        }

    found = (used & keeps).sum() / used.sum().clamp_min(1)
    zeros = 1 - used.float().mean().item()
    return Layer(zeros, found.item(), unions(used), unions(used & keeps), unions(keeps))


def _bytes(
    model: Any,
    linear: dict[str, torch.nn.Linear],
    copies: dict[str, Coarse],
    layers: list[Layer],
) -> dict[str, dict[int, float]]:
    """Return the weights that a step reads, by mode and number of tokens."""
    read = {id(p): p.nbytes for name, p in model.named_parameters() if "embed_" not in name}
    output = model.get_output_embeddings().weight
    dense = float(sum((read | {id(output): output.nbytes}).values()))
    ups = [linear[name].weight.nbytes for name in copies]
    downs = [module.weight.nbytes for name, module in linear.items() if name not in copies]
    extra = sum(part.nbytes for copy in copies.values() for part in vars(copy).values())

    found: dict[str, dict[int, float]] = {"dense": {}, "exact": {}, "predicted": {}}
    for b in BATCHES:
        by_layer = list(zip(ups, downs, layers, strict=True))
        exact = sum(down * (1 - layer.used[b]) for _, down, layer in by_layer)
        predicted = sum(down * (1 - layer.predicted[b]) for _, down, layer in by_layer)
        predicted += sum(up * (1 - layer.kept[b]) for up, _, layer in by_layer)
        found["dense"][b], found["exact"][b] = dense, dense - exact
        found["predicted"][b] = dense - predicted + extra
    return found


def run(model: str, text: str, recall: float) -> int:
    """Print the report of a model on a text, and return the exit status.

    Raises:
        SparsityError: for a recall that cannot be asked for, and see :func:`measure`.

    """
    SparsityConfig("predicted", recall=recall)
    print(measure(model, text, recall).text())
    return 0
