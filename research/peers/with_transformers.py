# SPDX-License-Identifier: Apache-2.0
"""A worker: ``generate`` of transformers, in static batches as large as the pool holds whole."""

from __future__ import annotations

import torch
import transformers

from research.peers.job import Job, Result, Stopwatch, widths, work


@torch.inference_mode()
def run(job: Job) -> Result:
    """One batch after another; prompts of one batch are of one length."""
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float32)
    options = {
        "do_sample": False,
        "min_new_tokens": job.output_len,
        "max_new_tokens": job.output_len,
        "pad_token_id": 0,
    }
    length = max(map(len, job.prompts)) + job.output_len
    size = min(job.max_num_seqs, job.pool_bytes // (job.bytes_per_token * length))
    model.generate(torch.tensor([job.prompts[0][:32]]), do_sample=False, max_new_tokens=2)
    tokens: list[list[int]] = []
    steps: list[int] = []
    watch = Stopwatch()
    for i in range(0, len(job.prompts), size):
        batch = torch.tensor(job.prompts[i : i + size])
        mask = torch.ones_like(batch)
        said = model.generate(batch, attention_mask=mask, **options)
        tokens += said[:, batch.shape[1] :].tolist()
        steps += [len(batch)] * job.output_len
    seconds, processor = watch.read()
    mean, peak = widths(steps)
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return Result(
        versions, tokens, seconds, processor, mean, peak, 0, size * length * job.bytes_per_token
    )


if __name__ == "__main__":
    work(run)
