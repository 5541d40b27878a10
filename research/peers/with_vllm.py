# SPDX-License-Identifier: Apache-2.0
"""A worker: vLLM, stock or with a policy. Options: ``policy``; the rest is of vLLM's ``LLM``."""

from __future__ import annotations

from importlib.metadata import version

from vllm import LLM, SamplingParams

from benchmarks.quality.forced import in_process
from benchmarks.throughput.watch import watching
from research.peers.job import BLOCK_SIZE, Job, Result, Stopwatch, work
from vllm_h2o import __version__

SCORE_BYTES = 8
"""Bytes of a score and a position, for a slot of one layer and KV head."""


def blocks(job: Job, heads: int) -> int:
    """Pages in the pool's bytes, the null page not counted.

    Args:
        job: what is run.
        heads: KV heads of all layers; 0: of stock vLLM.

    """
    return job.pool_bytes // ((job.bytes_per_token + heads * SCORE_BYTES) * BLOCK_SIZE)


def params(output_len: int, budget: int | None) -> SamplingParams:
    """So many tokens, whichever they are."""
    extra = None if budget is None else {"kv_budget": budget}
    return SamplingParams(
        temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False, extra_args=extra
    )


def run(job: Job) -> Result:
    """One engine, all requests at once."""
    options = dict(job.options)
    policy = options.pop("policy", None)
    heads = options.pop("kv_heads")
    num_blocks = blocks(job, heads if policy else 0)
    engine = in_process(
        model=job.folder,
        dtype="float32",
        max_model_len=max(map(len, job.prompts)) + job.output_len,
        max_num_seqs=job.max_num_seqs,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=num_blocks + 1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **({"kv_policy": policy} if policy else {}),
        **options,
    )
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in job.prompts]
    budgets = job.budgets or [None] * len(prompts)
    asked = [params(job.output_len, budget) for budget in budgets]
    with engine as llm:
        _warm(llm, job)
        with watching() as watch:
            stopwatch = Stopwatch()
            outputs = llm.generate(prompts, asked, use_tqdm=False)
            seconds, processor = stopwatch.read()
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    summary = watch.summary()
    versions = f"vLLM {version('vllm')}" + (f", vllm-h2o {__version__}" if policy else "")
    return Result(
        versions,
        tokens,
        seconds,
        processor,
        summary["mean_sequences"],
        int(summary["peak_sequences"]),
        int(summary["preemptions"]),
        round(summary["peak_usage"] * job.pool_bytes),
    )


def _warm(llm: LLM, job: Job) -> None:
    prompt = {"prompt_token_ids": list(job.prompts[0][:BLOCK_SIZE])}
    llm.generate([prompt], params(2, None), use_tqdm=False)


if __name__ == "__main__":
    work(run)
