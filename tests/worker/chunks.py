# SPDX-License-Identifier: Apache-2.0
"""Chunks of prompts, however they lie in a step."""

from __future__ import annotations

import torch

from vllm_h2o.kernels.batch import PromptChunk


def chunk_at(token: int, num_tokens: int, start: int, first_block: int) -> PromptChunk:
    """A chunk with blocks of its own."""
    table = torch.arange(first_block, first_block + 9, dtype=torch.int32)
    return PromptChunk(
        tokens=slice(token, token + num_tokens),
        block_table=table,
        resident_start=start,
        logical_start=start,
    )


CASES = {
    # name: (chunks, calls, of them paged)
    "one prompt": ([chunk_at(0, 50, 0, 0)], 1, 0),
    "prompts side by side": ([chunk_at(4, 30, 0, 0), chunk_at(34, 16, 0, 9)], 1, 0),
    "a later chunk among them": ([chunk_at(4, 30, 40, 0), chunk_at(34, 16, 0, 9)], 1, 1),
    "a decode between": ([chunk_at(21, 29, 0, 9), chunk_at(0, 20, 17, 0)], 2, 1),
}
