# SPDX-License-Identifier: Apache-2.0
"""vLLM's metadata of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata


def common_metadata(lengths: Sequence[int], table: torch.Tensor) -> CommonAttentionMetadata:
    """vLLM's metadata of rows with these numbers of tokens."""
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths),
        num_reqs=len(lengths),
        num_actual_tokens=sum(lengths),
        max_query_len=max(lengths, default=0),
        max_seq_len=max(lengths, default=0),
        block_table_tensor=table,
        slot_mapping=torch.zeros(sum(lengths), dtype=torch.int64),
    )
