# SPDX-License-Identifier: Apache-2.0
"""Queries are rotated as the model's own embedding rotates, or the engine does not start."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from vllm_h2o.worker import rotary
from vllm_h2o.worker.rotary import rope_back, rope_of

MOST = 128
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
    "half of the head": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "llama 3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def rope(
    parameters: dict[str, Any], neox: bool = True, most: int = MOST, dtype: Any = torch.float32
) -> Any:
    """vLLM's rotary embedding of heads of 64."""
    with set_current_vllm_config(VllmConfig()):
        return get_rope(64, most, neox, parameters, dtype)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("kind", PARAMETERS)
def test_turns_add_up(kind: str, neox: bool) -> None:
    """A query of position i, rotated by n, is one of position i + n."""
    embedding = rope(PARAMETERS[kind], neox)
    assert rotary._adds_up(embedding)
    query, positions = torch.randn(10, 3 * 64), torch.arange(20, 30)
    here, _ = embedding.forward_native(positions, query.clone())
    later, _ = embedding.forward_native(positions + 10, query.clone())
    rotated = rope_of(embedding)(here.view(10, 3, 64), torch.full((10,), 10))
    torch.testing.assert_close(rotated, later.view(10, 3, 64), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("end", "distance"), [(MOST - 4, 4), (MOST, 0)])
def test_as_far_as_positions_reach(end: int, distance: int) -> None:
    """Near the end of what the model knows, no further."""
    embedding = rope(PARAMETERS["plain"])
    query, positions = torch.randn(10, 64), torch.arange(end - 10, end)
    here, _ = embedding.forward_native(positions - 10, query.clone())
    later, _ = embedding.forward_native(positions - 10 + distance, query.clone())
    own = rope_of(embedding)
    assert own.reach(10, end) == distance
    rotated = own(here.view(10, 1, 64), torch.full((10,), distance))
    torch.testing.assert_close(rotated, later.view(10, 1, 64), rtol=1e-4, atol=1e-4)


def test_what_scales_does_not_add_up() -> None:
    """YaRN's cosines carry a factor, which would count twice."""
    scaled = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    }
    assert not rotary._adds_up(rope(scaled))


ROTATED: dict[str, dict[str, Any]] = {
    **PARAMETERS,
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("kind", ROTATED)
def test_keys_are_rotated_back(kind: str, neox: bool, dtype: torch.dtype) -> None:
    """Each by a distance of its own: the key of position i becomes that of position i - n."""
    rotate = rope_back(rope(ROTATED[kind], neox, dtype=dtype), MOST)
    assert rotate is not None
    key, positions = torch.randn(10, 3 * 64), torch.arange(100, 110)
    distance = torch.tensor([0, 1, 2, 50, 99, 100, 7, 7, 7, 109])
    exact = rope(ROTATED[kind], neox)  # in float32, whatever the model's table is
    here, _ = exact.forward_native(positions, key.clone())
    earlier, _ = exact.forward_native(positions - distance, key.clone())
    each = distance[:, None].expand(10, 3)
    rotated = rotate(here.view(10, 3, 64), each)
    torch.testing.assert_close(rotated, earlier.view(10, 3, 64), rtol=1e-4, atol=1e-4)
    assert torch.equal(rotated[0], here.view(10, 3, 64)[0])  # by nothing: not a bit


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_embeddings_that_are_refused(parameters: dict[str, Any]) -> None:
    """They scale, or depend on a length; and nothing rotates further than a table reaches."""
    assert rope_back(rope({"rope_theta": 10000.0, **parameters}), MOST) is None
    assert rope_back(rope(PARAMETERS["plain"]), MOST + 1) is None


def test_a_table_that_is_another() -> None:
    """A subclass that overrides frequencies would be found by its cosines."""
    embedding = rope(PARAMETERS["plain"])
    embedding = copy.deepcopy(embedding)
    embedding.cos_sin_cache[5, 3] += 0.05
    assert rope_back(embedding, MOST) is None


@pytest.mark.parametrize(
    ("dtype", "times", "most"),
    [(torch.float32, 10_000, 1e-3), (torch.bfloat16, 140, 0.05)],
    ids=["float32", "bfloat16"],
)
def test_repeated_rotation_equals_one_rotation(dtype: torch.dtype, times: int, most: float) -> None:
    """A key that is rotated back and stored again and again is what one rotation makes of it.

    By 7,000 positions each time, as with 8,192 of them and 1,192 slots: 140 times is a million
    tokens. A sink is rotated by nothing, and does not drift at all.
    """
    embedding = rope(PARAMETERS["plain"], most=8192)
    rotate = rope_back(embedding, 8192)
    assert rotate is not None
    torch.manual_seed(0)
    key, distance = torch.randn(64, 64).to(dtype), torch.full((64,), 7000)
    stored = key.clone()
    for _ in range(times):
        stored = rotate(stored.float(), distance).to(dtype)
    angle = -times * 7000 * embedding._compute_inv_freq(embedding.base).double()
    a, b = key.double().chunk(2, dim=1)
    cos, sin = angle.cos(), angle.sin()
    right = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=1)
    error = (stored.double() - right).norm(dim=1) / right.norm(dim=1)
    assert float(error.max()) < most
    assert torch.equal(rotate(key.float(), torch.zeros(64, dtype=torch.int64)), key.float())
