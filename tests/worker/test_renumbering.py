# SPDX-License-Identifier: Apache-2.0
"""The positions that the model reads while a step runs, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_h2o.errors import IntegrityError
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.policy import Budget
from vllm_h2o.wire import RequestPlan
from vllm_h2o.worker.after_step import Layers
from vllm_h2o.worker.renumbering import Rolled, renumber


def plan(start: int, num_new: int, offset: int) -> RequestPlan:
    """Of a prompt's chunk."""
    return RequestPlan(
        logical_start=start,
        num_new=num_new,
        prompt_end=start + num_new,
        resident_start=8,
        budget=Budget(16, 15, 0, 0),
        offset=offset,
    )


PLANS = [plan(30, 3, 22), plan(5, 2, 0), plan(90, 1, 71)]
INDICES = [30, 31, 32, 5, 6, 90, 0, 0]
"""Of the tokens of these, and of two that are padding."""


def test_while_the_model_reads_them() -> None:
    """Each request's offset is off its own tokens, and afterwards on again."""
    positions = torch.tensor(INDICES)
    rolled = Rolled.of(PLANS, positions, limit=20)
    assert rolled is not None
    assert positions.tolist() == [8, 9, 10, 5, 6, 19, 0, 0]
    rolled.run()
    assert positions.tolist() == INDICES


def test_nothing_to_do() -> None:
    """Before the first renumbering positions are indices, and nobody needs to hand them over."""
    assert Rolled.of([plan(5, 2, 0)], None, limit=20) is None


def test_padding_has_positions_that_the_model_knows() -> None:
    """Where an earlier step left indices, whether or not this one rolls."""
    positions = torch.tensor([*INDICES[:6], 500_000, 500_001])
    rolled = Rolled.of(PLANS, positions, limit=20)
    assert rolled is not None
    rolled.run()
    assert positions.tolist() == INDICES
    positions = torch.tensor([5, 6, 500_000])
    assert Rolled.of([plan(5, 2, 0)], positions, limit=20) is None
    assert positions.tolist() == [5, 6, 0]


@pytest.mark.parametrize(
    ("positions", "limit", "message"),
    [
        (INDICES, 19, "a query would have position 19, and there are 19"),
        (None, 20, "the model runner does not hand them over"),
        (
            [30, 31, 33, 5, 6, 90],
            20,
            r"positions \[8, 9, 11, 5, 6, 19\], the plans say",
        ),
    ],
)
def test_what_must_not_be(positions: list[int] | None, limit: int, message: str) -> None:
    """A position that the model does not know; none; others than the plans'."""
    given = None if positions is None else torch.tensor(positions)
    with pytest.raises(IntegrityError, match=message):
        Rolled.of(PLANS, given, limit)


def test_keys_that_nothing_rotates() -> None:
    """Who forgot to look for an embedding when the model was loaded is told so."""
    impl = SimpleNamespace(rope_back=None, cache_of=lambda cache: cache)
    layer = SimpleNamespace(impl=impl, kv_cache=None)
    layers = Layers(["layer 0"], {"layer 0": layer})
    with pytest.raises(IntegrityError, match="nothing rotates the keys of layer 0"):
        renumber(PLANS[0], torch.zeros(1), layers, TorchKernels(), accumulates=False)
