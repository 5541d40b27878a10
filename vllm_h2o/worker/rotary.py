"""Queries turned onwards, as if asked later: a rotary embedding's turn, done once more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from vllm_h2o.errors import UnsupportedError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.worker.attention import HeavyHitterImpl


@dataclass(frozen=True)
class Turn:
    """Turns by a number of positions, which add up: ``turn(embed(q, i), n) = embed(q, i + n)``.

    Args:
        rotary: the layer's own.

    """

    rotary: RotaryEmbedding

    def __call__(self, query: torch.Tensor, end: int) -> torch.Tensor:
        """Turn a chunk's queries behind its end, or as far as the model's positions reach.

        Args:
            query: [T, Hq, D], with their positions.
            end: one past the position of the last.

        Returns:
            [T, Hq, D], float32: those of T positions later.

        """
        rotary, table = self.rotary, self.rotary.cos_sin_cache
        distance = max(min(len(query), len(table) - end), 0)
        turned, _ = RotaryEmbedding.forward_static(
            torch.zeros(len(query), dtype=torch.int64, device=query.device),
            query.to(torch.float32),
            None,
            rotary.head_size,
            rotary.rotary_dim,
            table[distance : distance + 1].to(torch.float32),
            rotary.is_neox_style,
        )
        return turned


def bind(model: torch.nn.Module) -> None:
    """Give each of the policy's attention layers the turn of the rotary embedding beside it.

    Raises:
        UnsupportedError: when it has none, or one whose turns do not add up.

    """
    for name, module in model.named_modules():
        children = list(module.children())
        for layer in children:
            if not (isinstance(layer, Attention) and isinstance(layer.impl, HeavyHitterImpl)):
                continue
            found = [child for child in children if isinstance(child, RotaryEmbedding)]
            if len(found) != 1 or not _adds_up(found[0]):
                kinds = ", ".join(type(child).__name__ for child in found)
                raise UnsupportedError(
                    "score='replay'",
                    f"{name} has {kinds or 'no rotary embedding beside its attention'}",
                    "queries are asked again by turning them onwards, as one rotary embedding that "
                    "does not scale allows",
                    "use score=mean_squares (--kv-policy h2o_mean), or another model",
                )
            layer.impl.turn = Turn(found[0])


def _adds_up(rotary: RotaryEmbedding) -> bool:
    """Whether the turn of position 0 is none: one that also scales would scale twice."""
    cos, sin = rotary.cos_sin_cache[0].chunk(2)
    return bool((cos == 1).all() and (sin == 0).all())


class BindsTurns:
    """Mixed into vLLM's worker class: finds what turns queries, where a policy asks them again."""

    vllm_config: Any
    model_runner: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model; see :func:`bind`."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        config = KVPolicyConfig.from_additional_config(self.vllm_config.additional_config)
        if config is not None and config.score_replays:
            bind(self.model_runner.get_model())
