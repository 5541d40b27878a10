# SPDX-License-Identifier: Apache-2.0
"""Queries of drafts: kept until the request's next step, and used once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.harness import Shape, builder
from tests.kernels.metadata import common_metadata
from vllm_h2o.errors import IntegrityError
from vllm_h2o.policy import Budget
from vllm_h2o.wire import RequestPlan, ResidencyPlan
from vllm_h2o.worker.drafts import DraftQueries
from vllm_h2o.worker.metadata import HeavyHitterMetadata
from vllm_h2o.worker.step import Step, publish

SHAPE = Shape(num_kv_heads=2, block_size=16)
DRAFTED = RequestPlan(
    logical_start=50,
    num_new=4,
    prompt_end=40,
    resident_start=20,
    budget=Budget(40, 31, 0, 0, evict_every=9),
)
NEXT = replace(DRAFTED, logical_start=53, num_new=1, resident_start=23, num_unscored=3)
TABLE = torch.tensor([[8, 9, 1, 2, 3, 0], [5, 6, 7, 0, 0, 0]], dtype=torch.int32)


def build(
    kept: DraftQueries, plans: dict[str, RequestPlan], policy: str = "h2o"
) -> HeavyHitterMetadata:
    """Of a step, with what earlier ones kept."""
    step = Step(ResidencyPlan(plans), lambda _: list(plans), draft_queries=kept)
    with publish(step):
        lengths = [plan.num_new for plan in plans.values()]
        return builder(SHAPE, policy).build(0, common_metadata(lengths, TABLE[: len(plans)]))


@pytest.mark.parametrize("first_block_idx", [0, 2])
def test_kept_and_used(first_block_idx: int) -> None:
    """Of a step that computes several tokens; the next one's chunk is what was accepted."""
    kept: DraftQueries = {}
    start = {"first_block_idx": first_block_idx}
    metadata = build(kept, {"a": replace(DRAFTED, **start)})
    ((tokens, queries),) = metadata.drafts.drafted
    assert (tokens, queries, metadata.drafts.accepted) == (slice(0, 4), {}, [])
    assert [chunk.first_scoring_query for chunk in metadata.prompts] == [4]
    assert not any(metadata.asked)
    queries["layer"] = torch.ones(4, 2, 64)
    # A step without the request changes nothing.
    build(kept, {"b": replace(NEXT, num_unscored=0)})
    metadata = build(kept, {"a": replace(NEXT, **start)})
    ((chunk, found),) = metadata.drafts.accepted
    assert found is queries and metadata.drafts.drafted == [] and not kept
    assert (chunk.num_tokens, chunk.resident_start, chunk.logical_start) == (3, 20, 50)
    assert chunk.block_table[:2].tolist() == TABLE[0, first_block_idx:][:2].tolist()


def test_lost_queries_are_seen() -> None:
    """Scores would be those of other tokens."""
    with pytest.raises(IntegrityError, match="the queries of its drafts are gone"):
        build({}, {"a": NEXT})


def test_nothing_is_kept_that_would_not_score() -> None:
    """Of a policy without scores, and of a request that fits; who begins again starts anew."""
    kept: DraftQueries = {}
    for policy, fits in (("streaming", False), ("h2o", True)):
        for plan in (DRAFTED, NEXT):
            metadata = build(kept, {"a": replace(plan, fits=fits)}, policy)
            assert (metadata.drafts.drafted, metadata.drafts.accepted, kept) == ([], [], {})
    build(kept, {"a": DRAFTED})
    assert [*kept] == ["a"]
    again = replace(DRAFTED, logical_start=0, num_new=9, resident_start=0)
    assert build(kept, {"a": again}).drafts.accepted == [] and not kept
