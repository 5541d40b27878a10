"""Queries are turned as the model's own embedding turns, or the engine does not start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from tests.e2e.harness import engine, tiny_opt
from vllm_h2o.worker import rotary
from vllm_h2o.worker.rotary import RopeShift

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


def rope(parameters: dict[str, Any], neox: bool = True) -> Any:
    """vLLM's rotary embedding of heads of 64."""
    with set_current_vllm_config(VllmConfig()):
        return get_rope(64, MOST, neox, parameters, torch.float32)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("kind", PARAMETERS)
def test_turns_add_up(kind: str, neox: bool) -> None:
    """A query of position i, turned by n, is one of position i + n."""
    embedding = rope(PARAMETERS[kind], neox)
    assert rotary._adds_up(embedding)
    query, positions = torch.randn(10, 3 * 64), torch.arange(20, 30)
    here, _ = embedding.forward_native(positions, query.clone())
    later, _ = embedding.forward_native(positions + 10, query.clone())
    turned = RopeShift(embedding)(here.view(10, 3, 64), 10, 30)
    torch.testing.assert_close(turned, later.view(10, 3, 64), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("end", "distance"), [(MOST - 4, 4), (MOST, 0)])
def test_as_far_as_positions_reach(end: int, distance: int) -> None:
    """Near the end of what the model knows, no further."""
    embedding = rope(PARAMETERS["plain"])
    query, positions = torch.randn(10, 64), torch.arange(end - 10, end)
    here, _ = embedding.forward_native(positions - 10, query.clone())
    later, _ = embedding.forward_native(positions - 10 + distance, query.clone())
    turned = RopeShift(embedding)(here.view(10, 1, 64), 10, end)
    torch.testing.assert_close(turned, later.view(10, 1, 64), rtol=1e-4, atol=1e-4)


def test_what_scales_does_not_add_up() -> None:
    """YaRN's cosines carry a factor, which would count twice."""
    scaled = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    }
    assert not rotary._adds_up(rope(scaled))


def test_a_model_without(tmp_path: Path) -> None:
    """OPT learns its positions; without a turn the policy would be another one, silently."""
    with (
        pytest.raises(
            Exception, match=r"score='second_pass'; is: .* has no rotary embedding next to"
        ),
        engine(tiny_opt(tmp_path), "h2o", {"budget": 32, "score": "second_pass"}),
    ):
        pass
