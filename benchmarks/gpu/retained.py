# SPDX-License-Identifier: Apache-2.0
"""Compare what an engine keeps with a model in float64 whose heads are the reference's.

The model is random, and computed on the processor from weights and tokens alone: whatever differs
in a prompt's attention, scores, packing, victims or graphs shows as other tokens kept.

Usage::

    python -m benchmarks.gpu.retained OUT.json [--dtype float32] [--prompt 500] [--tokens 96]
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.engine import MAX_MODEL_LEN, NUM_LAYERS, model_of, prompts_of
from benchmarks.quality.llama import Llama
from vllm_h2o.kernels.reference import Head
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.policy import Budget, policies
from vllm_h2o.trace.record import NOTHING, Frame, record

BUDGET, BLOCK_SIZE = 96, 32
Kept = dict[int, list[list[set[int]]]]
"""By tokens computed: of each layer and KV head, the positions that are held."""


@torch.no_grad()
def kept_by_reference(
    folder: Path, dtype: torch.dtype, token_ids: Sequence[int], prompt_len: int, budget: Budget
) -> Kept:
    """Collect what each head holds after the prompt, and after each token that follows.

    Args:
        folder: of a Llama.
        dtype: to which the engine rounds its weights.
        token_ids: of the prompt, and what was generated, all of which is computed but the last.
        prompt_len: tokens of the prompt.
        budget: slots of a head.

    """
    model = Llama(folder)
    model.weights = {name: weight.to(dtype).double() for name, weight in model.weights.items()}
    length = len(token_ids) - 1
    x = model.embed(torch.tensor([token_ids[:length]]))
    chunks = [slice(0, prompt_len), *(slice(i, i + 1) for i in range(prompt_len, length))]
    kept: Kept = {chunk.stop: [] for chunk in chunks}
    for layer in range(model.num_layers):
        query, key, value = model.qkv(layer, x, 0)
        attended = torch.empty_like(query)
        for held in kept.values():
            held.append([])
        for index in range(model.num_kv_heads):
            strip = Strip.empty(model.head_size, torch.float64)
            head = Head(strip, budget, policies()["h2o"].ranking, scale=model.scale)
            for chunk in chunks:
                asked = query[0, index, :, chunk].transpose(0, 1)
                out = head.step(
                    asked, key[0, index, chunk], value[0, index, chunk], chunk.start == 0
                )
                attended[0, index, :, chunk] = out.transpose(0, 1)
                kept[chunk.stop][layer].append(set(head.strip.position.tolist()))
        x = model.finish(layer, x, attended)
    return kept


def differing(frames: Sequence[Frame], kept: Kept) -> tuple[int, float]:
    """How many sets were compared, and the mean share of their tokens that the other has not."""
    shares = []
    for frame in frames:
        for heads, expected in zip(frame.position, kept[frame.logical_len], strict=True):
            for position, theirs in zip(heads, expected, strict=True):
                ours = set(position[position != NOTHING].tolist())
                shares.append(len(ours ^ theirs) / (len(ours) + len(theirs)))
    return len(shares), sum(shares) / len(shares)


def main() -> None:
    """Record, compare, and write the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--prompt", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM

    folder = model_of("llama", args.layers)
    llm = LLM(
        str(folder),
        dtype=args.dtype,
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=64,
        enable_prefix_caching=False,
        kv_policy="h2o",
        kv_policy_config={"budget": BUDGET},
    )
    prompt = prompts_of(1, shared=0)[0]["prompt_token_ids"][: args.prompt]
    _, token_ids, frames = record(llm, prompt, 1, args.tokens)
    budget = KVPolicyConfig(name="h2o", budget=BUDGET).resolve(MAX_MODEL_LEN, BLOCK_SIZE)
    dtype = getattr(torch, args.dtype)
    kept = kept_by_reference(folder, dtype, token_ids, len(prompt), budget)
    num_sets, share = differing(frames, kept)
    args.out.write_text(json.dumps({"num_sets": num_sets, "differing": share}))


if __name__ == "__main__":
    main()
