# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of one engine with random weights, in a file: two engines are compared by them.

And what memory it finds for its pool, once its prompts' peaks are known.

The weights are wide enough for every layer's attention to decide what is said; those of vLLM's
``dummy`` format are not.

Usage::

    python -m benchmarks.gpu.engine OUT.json opt|llama [--policy-budget 1.0] [--eager] [--v1] ...
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from benchmarks.throughput.models import write_random

MAX_MODEL_LEN = 1024
NUM_LAYERS = 6
LENGTHS = (500, 257, 100, 33, 7, 1)
"""Lengths of prompts, one after another: next to the ends of pages, and of one token."""
SHAPES: dict[str, dict[str, Any]] = {
    "opt": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": 4096,
        "hidden_size": 768,
        "word_embed_proj_dim": 768,
        "ffn_dim": 3072,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "activation_function": "relu",
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


def model_of(shape: str, num_layers: int = NUM_LAYERS) -> Path:
    """Random weights, in one folder for all engines of a shape and a number of layers.

    vLLM compiles the graph of a model once for each folder that it is in.
    """
    folder = Path(tempfile.gettempdir()) / f"vllm-h2o-{shape}-{num_layers}"
    if not folder.exists():
        partial = Path(tempfile.mkdtemp())
        config = AutoConfig.for_model(**SHAPES[shape], num_hidden_layers=num_layers)
        write_random(config, partial, std=0.05)
        partial.rename(folder)
    return folder


def prompts_of(num: int, shared: int) -> list[dict[str, list[int]]]:
    """Random ones, whose first ``shared`` tokens are the same."""
    rng = random.Random(0)
    common = [rng.randrange(5, 4096) for _ in range(shared)]
    return [
        {"prompt_token_ids": (common + [rng.randrange(5, 4096) for _ in range(length)])[:length]}
        for length in islice(cycle(LENGTHS), num)
    ]


def pool_bytes(worker: Any) -> int | None:
    """Bytes that vLLM's profile run leaves for the pool; None on a CPU: nothing is profiled."""
    return getattr(worker, "available_kv_cache_memory_bytes", None)


def forbid_waits(_: Any) -> None:
    """Let what moves survivors and scores after a forward pass fail where it waits."""
    import torch

    from vllm_h2o.worker.after_step import AfterStep

    run = AfterStep.run

    def checked(self: AfterStep) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(self)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    if torch.cuda.is_available():
        AfterStep.run = checked  # type: ignore[method-assign]


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The policy's options, if there is one."""
    if args.policy_budget is None:
        return {}
    config: dict[str, Any] = {"budget": args.policy_budget}
    config |= {"evict_every": "page"} if args.pages else {}
    config |= {"score": args.score} if args.score else {}
    return {"kv_policy": args.policy, "kv_policy_config": config}


def parser_of() -> argparse.ArgumentParser:
    """The options of an engine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("--policy-budget", type=float, default=None)
    parser.add_argument("--score", help="of the policy, if it is not its own")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--v1", action="store_true", help="vLLM's first model runner")
    parser.add_argument("--pages", action="store_true", help="evict whole pages")
    parser.add_argument(
        "--prefixes", action="store_true", help="prefix caching, of prompts that begin alike"
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="fail where a kernel is compiled late, or a forward pass or what follows it waits",
    )
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dtype", default="float16")
    return parser


def main() -> None:
    """Generate, and write the tokens."""
    args = parser_of().parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # pool_bytes goes to the worker
    if args.v1:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if args.strict:
        os.environ["VLLM_GPU_SYNC_CHECK"] = "error"
    from vllm import LLM, SamplingParams

    options = options_of(args)
    llm = LLM(
        str(model_of(args.shape, args.layers)),
        dtype=args.dtype,
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        block_size=32,
        num_gpu_blocks_override=600,
        enable_prefix_caching=args.prefixes,
        jit_monitor_mode="error" if args.strict else "warn",
        enforce_eager=args.eager,
        seed=0,
        **options,
    )
    prompts = prompts_of(args.requests, shared=200 if args.prefixes else 0)
    greedy = SamplingParams(
        temperature=0, max_tokens=args.tokens, ignore_eos=True, detokenize=False
    )
    if args.strict and options:
        llm.collective_rpc(forbid_waits)
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    (memory,) = llm.collective_rpc(pool_bytes)
    args.out.write_text(json.dumps({"tokens": found, "pool_bytes": memory}))


if __name__ == "__main__":
    main()
