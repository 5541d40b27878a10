# SPDX-License-Identifier: Apache-2.0
"""Two Ray nodes on this machine, with a rank on each; prints the tokens as JSON.

Usage::

    python -m tests.e2e.on_ray MODEL

vLLM's CPU platform names no device that Ray counts; here each node has one.
"""

from __future__ import annotations

import json
import sys

PROMPTS = ["The old sailor told us about the storm. " * 5, "abc"]
"""Longer than the budget, and shorter."""


def name_device() -> None:
    """Let Ray count a device of each node, in this process and in Ray's workers."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"


def tokens(model: str, **settings: object) -> list[list[int]]:
    """Return what an engine says."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        block_size=16,
        kv_policy="h2o",
        kv_policy_config={"budget": 64},
        **settings,
    )
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, use_tqdm=False)]


def main() -> None:
    """Run the same prompts in this process, and on two nodes."""
    import ray
    from ray.cluster_utils import Cluster

    said = {"alone": tokens(sys.argv[1])}
    name_device()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 1})
    cluster.add_node(num_cpus=2, num_gpus=1)
    hook = {"worker_process_setup_hook": "tests.e2e.on_ray.name_device"}
    ray.init(address=cluster.address, runtime_env=hook)
    said["ray"] = tokens(sys.argv[1], tensor_parallel_size=2, distributed_executor_backend="ray")
    print(json.dumps(said), flush=True)  # Ray ends its nodes with this process


if __name__ == "__main__":
    main()
