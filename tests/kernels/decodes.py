# SPDX-License-Identifier: Apache-2.0
"""Decode steps for every set of kernels, and their comparison with the torch ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from tests.kernels.caches import copied, filled, on_triton, same
from tests.kernels.harness import Shape
from vllm_h2o.kernels.batch import DECODE_FIELDS, DecodeBatch, Scoring, StepTensors
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.kernels.native import loader
from vllm_h2o.kernels.torch.kernels import TorchKernels


def native_variant(variant: str) -> Callable[[Shape], Kernels]:
    """One of the builds for this processor."""
    return lambda shape: loader.load(variant)


KERNELS: dict[str, Callable[[Shape], Kernels]] = {
    "triton": on_triton,
    **{variant: native_variant(variant) for variant in loader.available()},
}


def slow_on_triton(kernels: Mapping[str, object], argument: str = "make") -> pytest.MarkDecorator:
    """Parametrize a test for which Triton's interpreter takes seconds, and the others do not."""
    slow = {"triton": pytest.mark.slow}
    cases = [
        pytest.param(make, id=name, marks=slow.get(name, ())) for name, make in kernels.items()
    ]
    return pytest.mark.parametrize(argument, cases)


def decode_batch(shape: Shape, split: bool = False) -> tuple[DecodeBatch, int]:
    """Requests that append, overwrite, select or are padding, and how many blocks they own."""
    owned, tables, fields = 0, [], []
    size = shape.block_size
    for token, attended in enumerate((1, size - 1, 2 * size, 3 * size + 5, 0, 9 * size, 6 * size)):
        num_pages = -(-attended // size)
        tables.append([owned + page for page in range(num_pages)] + [0] * (9 - num_pages))
        owned += num_pages
        values = {
            "token": token,
            "attended_len": attended,
            "overwrites": token in (2, 5),
            "selects": attended > 0 and attended % size == 0,
            "logical_start": 1000,
            "recent_start": 998 - 10 * token,
            "num_sinks": token,
            "scores": token != 3,
            "split": split and token in (2, 5, 6),
        }
        fields.append([int(values.get(name, 0)) for name in DECODE_FIELDS])
    # They lie as a graph's buffer has them, request by request.
    table = torch.tensor(tables, dtype=torch.int32)
    return DecodeBatch(table, torch.tensor(fields).T), owned


def compare_a_batch(
    make: Callable[[Shape], Kernels],
    shape: Shape,
    scoring: Scoring,
    sink_logits: torch.Tensor | None = None,
) -> None:
    """One batch of all kinds of requests, and victims for those that overwrite."""
    batch, owned = decode_batch(shape)
    theirs = filled(shape, owned + 1, seed=2, merges=scoring.merge > 0)
    victims = torch.zeros(owned + 1, 2, dtype=torch.int32)
    victims[batch.first_block_ids[2]] = torch.tensor([0, shape.block_size])
    victims[batch.first_block_ids[5]] = torch.tensor([7 * shape.block_size, 3 * shape.block_size])
    compare_decodes(make, shape, scoring, batch, theirs, victims, sink_logits)


def compare_decodes(
    make: Callable[[Shape], Kernels],
    shape: Shape,
    scoring: Scoring,
    batch: DecodeBatch,
    theirs: LayerCache,
    victims: torch.Tensor,
    sink_logits: torch.Tensor | None = None,
) -> None:
    """The batch on two copies of the same pages; where victims are merged, some are."""
    ours, before = copied(theirs, shape), theirs.mass
    before = None if before is None else before.clone()
    torch.manual_seed(3)
    heads = shape.num_kv_heads
    query = torch.randn(7, heads * shape.group, shape.head_size).to(shape.dtype)
    key, value = torch.randn(2, 7, heads, shape.head_size).to(shape.dtype)
    results = []
    for kernels, cache in ((TorchKernels(), theirs), (make(shape), ours)):
        out, chosen = torch.full(query.shape, 7.0), victims.clone()
        rows = [0, 1, 2, 3, 5, 6] if kernels.copies_kv else list(range(7))
        real = DecodeBatch(batch.block_table[rows], batch.fields[:, rows])
        tensors = StepTensors(query, key, value, out, 0.2, sink_logits)
        kernels.decode(cache, real, chosen, tensors, scoring)
        results.append((out, chosen))
    agree(results, victims, 1e-5 if shape.dtype == torch.float32 else 2e-3)
    same(ours, theirs, len(victims) - 1)
    if before is not None:
        assert theirs.mass is not None and (theirs.mass > before).any()


def agree(
    results: list[tuple[torch.Tensor, torch.Tensor]], victims: torch.Tensor, atol: float
) -> None:
    """Outputs and victims, where some were chosen; the fifth request is padding."""
    (expected, their_victims), (out, our_victims) = results
    expected[4] = 0.0
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=atol)
    assert torch.equal(our_victims, their_victims)
    assert (our_victims != victims).any()
