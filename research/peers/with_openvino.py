# SPDX-License-Identifier: Apache-2.0
"""A worker: OpenVINO GenAI's continuous batching, in an environment of its own.

Options: ``eviction``, of ``CacheEvictionConfig``, with ``aggregation_mode`` by name; ``precision``,
of the arithmetic and the cache (f32).
"""

from __future__ import annotations

import numpy as np
import openvino
import openvino_genai as genai

from research.peers.job import BLOCK_SIZE, Job, Result, Stopwatch, widths, work


def pipeline(job: Job) -> genai.ContinuousBatchingPipeline:
    """With as many blocks as the pool's bytes hold, and one thread."""
    config = genai.SchedulerConfig()
    config.num_kv_blocks = job.pool_bytes // (job.bytes_per_token * BLOCK_SIZE)
    config.max_num_seqs = job.max_num_seqs
    config.enable_prefix_caching = False
    if eviction := job.options.get("eviction"):
        mode = getattr(genai.AggregationMode, eviction["aggregation_mode"])
        config.use_cache_eviction = True
        config.cache_eviction_config = genai.CacheEvictionConfig(
            **{**eviction, "aggregation_mode": mode}
        )
    precision = job.options["precision"]
    return genai.ContinuousBatchingPipeline(
        job.folder,
        config,
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": 1,
        },
    )


def greedy(output_len: int) -> genai.GenerationConfig:
    """So many tokens, whichever they are."""
    config = genai.GenerationConfig()
    config.do_sample = False
    config.ignore_eos = True
    config.max_new_tokens = config.min_new_tokens = output_len
    return config


def tensor(prompt: list[int]) -> openvino.Tensor:
    """[1, n], int64."""
    return openvino.Tensor(np.asarray([prompt], dtype=np.int64))


def run(job: Job) -> Result:
    """Add all requests, then step until none is left."""
    pipe = pipeline(job)
    pipe.generate([tensor(job.prompts[0][:BLOCK_SIZE])], [greedy(2)])
    watch = Stopwatch()
    handles = [
        pipe.add_request(i, tensor(prompt), greedy(job.output_len))
        for i, prompt in enumerate(job.prompts)
    ]
    tokens: list[list[int]] = [[] for _ in handles]
    steps, usage = [], 0.0
    while pipe.has_non_finished_requests():
        pipe.step()
        usage = max(usage, pipe.get_metrics().cache_usage)
        width = 0
        for said, handle in zip(tokens, handles, strict=True):
            while handle.can_read():
                for output in handle.read().values():
                    said += output.generated_ids
                    width += 1
        steps.append(width)
    seconds, processor = watch.read()
    mean, peak = widths(steps)
    versions = f"openvino-genai {genai.__version__}"
    peak_bytes = round(usage / 100 * job.pool_bytes)
    return Result(versions, tokens, seconds, processor, mean, peak, -1, peak_bytes)


if __name__ == "__main__":
    work(run)
