"""Queries rotated to later positions, for a second pass: the rotary embedding's own rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from vllm_h2o.errors import UnsupportedError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.worker.attention import HeavyHitterImpl

logger = init_logger("vllm.kv_policy")


@dataclass(frozen=True)
class RopeShift:
    """Rotates by a number of positions: ``shift(embed(q, i), n) = embed(q, i + n)``.

    Args:
        rotary: the layer's own.

    """

    rotary: RotaryEmbedding

    def __call__(self, query: torch.Tensor, distance: int, end: int) -> torch.Tensor:
        """Rotate a chunk's queries past its end, or as far as the model's positions reach.

        Args:
            query: [T, Hq, D], with their positions.
            distance: tokens of the chunk.
            end: one past the position of the last.

        Returns:
            [T, Hq, D], float32: at so many positions later.

        """
        rotary, table = self.rotary, self.rotary.cos_sin_cache
        distance = max(min(distance, len(table) - end), 0)
        rotated, _ = RotaryEmbedding.forward_static(
            torch.zeros(len(query), dtype=torch.int64, device=query.device),
            query.to(torch.float32),
            None,
            rotary.head_size,
            rotary.rotary_dim,
            table[distance : distance + 1].to(torch.float32),
            rotary.is_neox_style,
        )
        return rotated


ROTATED_NEXT_TO_WINDOWS = frozenset({"gemma2", "gemma3_text", "mistral", "olmo3", "qwen3"})
"""Models with sliding windows that rotate queries of full attention, too. Others have the rotary
embedding there and leave it out: Cohere 2, EXAONE 4."""


def bind(model: torch.nn.Module, score: str, model_type: str) -> None:
    """Give each of the policy's attention layers the rotation of its own rotary embedding.

    Args:
        model: vLLM's.
        score: its name; ``combined`` does without the second pass where nothing rotates.
        model_type: in the model's config.

    Raises:
        UnsupportedError: when a layer has none, or one whose rotations do not add up, and a second
            pass is all that the score is about.

    """
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    slides = any(layer.sliding_window is not None for layer in layers)
    is_known = not slides or model_type in ROTATED_NEXT_TO_WINDOWS
    for name, module in model.named_modules():
        children = list(module.children())
        for layer in children:
            if not (isinstance(layer, Attention) and isinstance(layer.impl, HeavyHitterImpl)):
                continue
            found = [child for child in children if isinstance(child, RotaryEmbedding)]
            if len(found) != 1 or not is_known or not _adds_up(found[0]):
                kinds = ", ".join(type(child).__name__ for child in found)
                kinds += "" if is_known else f" that {model_type} may leave out next to windows"
                has = f"{name} has {kinds or 'no rotary embedding next to its attention'}"
                why = "rotates queries, which takes one rotary embedding that does not scale"
                if score == "combined":
                    logger.warning("%s: the second pass, which %s, is left out.", has, why)
                    return
                raise UnsupportedError(
                    f"score={score!r}",
                    has,
                    f"a second pass {why}",
                    "use score=mean_squares, or another model",
                )
            layer.impl.rotate = RopeShift(found[0])


def _adds_up(rotary: RotaryEmbedding) -> bool:
    """Whether the rotation of position 0 is none: one that also scales would scale twice."""
    cos, sin = rotary.cos_sin_cache[0].chunk(2)
    return bool((cos == 1).all() and (sin == 0).all())


class BindsRopeShift:
    """Mixed into vLLM's worker class: finds what rotates queries, where a second pass scores."""

    vllm_config: Any
    model_runner: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model; see :func:`bind`."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        config = KVPolicyConfig.of(self.vllm_config)
        if config is not None and config.ranking.second_pass:
            model_type = self.vllm_config.model_config.hf_text_config.model_type
            bind(self.model_runner.get_model(), config.score_name, model_type)
