# SPDX-License-Identifier: Apache-2.0
"""A small OPT with ReLU, trained here on texts in the public domain, as a Hugging Face folder.

It has 6 million parameters and saw each text a few times: it knows common words and little else. It
has the zeros of a trained model, which random weights do not have. Its quality is not OPT's.

Usage::

    python -m benchmarks.relu [--steps 300] [--sparse 100] [--csv FILE]

It prints the folder, and what ``vllm-h2o sparsity`` prints of the model on the held-out chapters.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from benchmarks.quality.texts import documents
from benchmarks.record import append_rows, machine_name
from benchmarks.smollm2 import default_cache
from vllm_h2o.sparsity.config import RECALL
from vllm_h2o.sparsity.report import BATCHES, Report, measure

TEXTS = ("union_1850s", "union_1920s", "moby_dick")
HELD_OUT = 35
"""Last chapters of Moby Dick, which the model does not see; ``held_out.txt`` has them."""
BATCH, LENGTH = 16, 128
RATE, L1 = 1e-3, 0.5


def model_dir(steps: int = 300, sparse: int = 100, cache: Path | None = None) -> Path:
    """Return the folder of the model, trained first if it is not there: minutes of one core.

    Args:
        steps: of training, each of 2,048 tokens.
        sparse: further steps, in which the mean activation of neurons is a part of the loss.
        cache: the folder that holds it; by default ``vllm-h2o`` in the user's cache.

    Raises:
        TextsUnavailableError: when the texts are not in the cache and cannot be fetched.

    """
    target = (cache or default_cache()) / f"relu-6m-{steps}-{sparse}"
    if target.is_dir():
        return target
    texts = [text for name in TEXTS for text in documents(name)]
    texts, held_out = texts[:-HELD_OUT], texts[-HELD_OUT:]
    tokenizer = _tokenizer(texts)
    ids = torch.tensor(sum((encoded.ids for encoded in tokenizer.encode_batch(texts)), []))
    model = _trained(_config(tokenizer), ids, steps, sparse)
    partial = target.with_name(f".{target.name}-partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="</s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(partial)
    (partial / "held_out.txt").write_text("\n\n".join(held_out), encoding="utf-8")
    partial.rename(target)
    return target


def figures(folder: Path, steps: int, sparse: int, report: Report) -> dict[str, Any]:
    """Return the row of a report on the held-out text: means over layers."""

    def mean(values: Iterable[float]) -> float:
        return round(statistics.fmean(values), 4)

    layers = report.layers
    return {
        "model": folder.name,
        "machine": machine_name(),
        "steps": steps,
        "sparse_steps": sparse,
        "zeros": mean(layer.zeros for layer in layers),
        "recall_asked": RECALL,
        "recall": mean(layer.recall for layer in layers),
        **{f"used_{b}": mean(layer.used[b] for layer in layers) for b in BATCHES},
        **{f"kept_{b}": mean(layer.kept[b] for layer in layers) for b in BATCHES},
        **{f"nll_{mode}": round(nll, 5) for mode, nll in report.nll.items()},
        **{
            f"mb_{mode}_{b}": round(read[b] / 1e6, 3)
            for mode, read in report.bytes.items()
            for b in (1, 8)
        },
    }


def _tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<pad>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _config(tokenizer: Tokenizer) -> Any:
    return OPTConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        word_embed_proj_dim=256,
        ffn_dim=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=512,
        dropout=0.0,
        layerdrop=0.0,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )


def _trained(config: Any, ids: torch.Tensor, steps: int, sparse: int) -> Any:
    """Train with AdamW; the rate rises for 30 steps and falls to zero along a cosine."""
    torch.manual_seed(0)
    model = OPTForCausalLM(config)
    active: list[torch.Tensor] = []
    for layer in model.model.decoder.layers:
        layer.fc2.register_forward_pre_hook(lambda _, given: active.append(given[0].mean()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    total = steps + sparse
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min((i + 1) / 30, 0.5 + 0.5 * float(torch.tensor(i / total * torch.pi).cos())),
    )
    for step, batch in enumerate(_batches(ids, total)):
        active.clear()
        loss = model(input_ids=batch, labels=batch).loss
        whole = loss + L1 * torch.stack(active).mean() if step >= steps else loss
        optimizer.zero_grad()
        whole.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        if step % 20 == 0:
            print(f"step {step} of {total}: loss {loss.item():.3f}", flush=True)
    return model.eval()


def _batches(ids: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    for _ in range(count):
        starts = torch.randint(len(ids) - LENGTH, (BATCH,), generator=chance).tolist()
        yield torch.stack([ids[start : start + LENGTH] for start in starts])


def main() -> None:
    """Train, measure, print, append to the CSV."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relu", description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="of 2,048 tokens")
    parser.add_argument("--sparse", type=int, default=100, help="further steps for more zeros")
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    args = parser.parse_args()
    folder = model_dir(args.steps, args.sparse)
    print(folder)
    report = measure(str(folder), (folder / "held_out.txt").read_text(encoding="utf-8"), RECALL)
    print(report.text())
    if args.csv:
        append_rows(args.csv, [figures(folder, args.steps, args.sparse, report)])


if __name__ == "__main__":
    main()
