# SPDX-License-Identifier: Apache-2.0
"""The kernels' constants name the attributes of chunks that are sent."""

from __future__ import annotations

import torch

from vllm_h2o.kernels.batch import PromptChunk
from vllm_h2o.kernels.triton import pack, prefill
from vllm_h2o.kernels.triton.chunks import DeviceChunks
from vllm_h2o.policy import Term

CPU = torch.device("cpu")
CHUNK = PromptChunk(
    tokens=slice(3, 8),
    block_table=torch.arange(4, dtype=torch.int32),
    resident_start=20,
    logical_start=30,
    num_survivors=9,
    recent_start=31,
    num_sinks=2,
    first_scoring_query=4,
    first_window_query=2,
)


def test_fields_of_a_chunk() -> None:
    """Rows are attributes, columns chunks."""
    sent = DeviceChunks.of([CHUNK, CHUNK], prefill.CHUNK_FIELDS, CPU)
    assert len(sent) == 2 and sent.block_table.shape == (2, 4)
    assert sent.fields.dtype == torch.int32
    token_start, num_tokens, resident_start, logical_start = (
        sent.fields[number.value].tolist()
        for number in (
            prefill.TOKEN_START,
            prefill.NUM_TOKENS,
            prefill.RESIDENT_START,
            prefill.LOGICAL_START,
        )
    )
    assert (token_start, num_tokens) == ([3, 3], [5, 5])
    assert (resident_start, logical_start) == ([20, 20], [30, 30])


def test_queries_of_a_term() -> None:
    """Each kind of term has queries of its own, and what they see follows from it."""
    sent = DeviceChunks.of([CHUNK], prefill.CHUNK_FIELDS, CPU)
    terms = (None, Term("all"), Term("rotated"), Term("reread"), Term("window"))
    found = [prefill.asked(term) for term in terms]
    first = [sent.fields[asked["FIRST_QUERY"]].item() for asked in found]
    assert first == [4, 4, 4, 4, 2]
    assert [asked["SEES_LATER"] for asked in found] == [False, False, True, True, False]


def test_fields_of_a_packing_chunk() -> None:
    """The end of a chunk is computed by the chunk itself."""
    sent = DeviceChunks.of([CHUNK], pack.PACK_FIELDS, CPU)
    assert sent.fields[pack.ATTENDED_LEN.value].tolist() == [25]
    assert sent.fields[pack.LOGICAL_END.value].tolist() == [35]
    assert sent.fields[pack.NUM_SURVIVORS.value].tolist() == [9]
