# SPDX-License-Identifier: Apache-2.0
"""Generators of a batch while a step is sampled."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from vllm_h2o.worker.seeds import set_aside


def test_generators_of_thrown_away_samples_are_set_aside() -> None:
    """The same mapping has the others alone, and all of them afterwards."""
    generators = {row: torch.Generator().manual_seed(row) for row in (0, 2, 3)}
    states = {row: each.get_state() for row, each in generators.items()}
    mask = SimpleNamespace(np=np.array([True, True, False, True]))
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(generators=generators), discard_request_mask=mask
    )
    with set_aside(runner):
        assert [*generators] == [2]
        torch.rand(3, generator=generators[2])
    assert sorted(generators) == [0, 2, 3]
    unchanged = [row for row, each in generators.items() if each.get_state().equal(states[row])]
    assert sorted(unchanged) == [0, 3]
