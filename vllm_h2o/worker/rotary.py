# SPDX-License-Identifier: Apache-2.0
"""Find what rotates a model's heads by a number of positions: queries to later ones, for a second
pass; keys to earlier ones, where positions roll."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import (
    LinearScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

from vllm_h2o.errors import UnsupportedError
from vllm_h2o.kernels.rope import Rope
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.worker.attention import HeavyHitterImpl

logger = init_logger("vllm.kv_policy")


ROTARY = (RotaryEmbedding, MRotaryEmbedding)
NOWHERE = Rope(torch.zeros(1, 0, dtype=torch.float32), is_neox=True)
"""Leaves queries as they are: where states alone know positions, they are at any position."""


def rope_of(rotary: RotaryEmbeddingBase) -> Rope:
    """The rotation to later positions, by the embedding's own cosines and sines.

    A token of M-RoPE has a position of each axis, and each frequency turns by one of them: n more
    on all axes is one turn by n, as of a token with one position.
    """
    return Rope(rotary.cos_sin_cache, rotary.is_neox_style)


def rope_back(rotary: RotaryEmbeddingBase, num_positions: int) -> Rope | None:
    """The rotation to earlier positions; None where the embedding's cosines are not as expected.

    Angles are computed in float64: a key may be rotated ten thousand times, and errors of one
    distance add up. The embedding's own table, of positions, is float32's or the model's.
    """
    if type(rotary) not in ROTATED or len(rotary.cos_sin_cache) < num_positions:
        return None
    frequency = rotary._compute_inv_freq(rotary.base).to(torch.float64).cpu()
    if isinstance(rotary, LinearScalingRotaryEmbedding):
        if len(rotary.scaling_factors) > 1:
            return None
        frequency = frequency / rotary.scaling_factors[0]
    angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequency
    found = rotary.cos_sin_cache[:num_positions].to("cpu", torch.float32)
    own = torch.cat([angle.cos(), angle.sin()], dim=1).to(torch.float32)
    # bfloat16's cosines are off by up to 2^-9, float32's angles by 2^-24 of their size.
    if not torch.allclose(found, own, rtol=0.0, atol=4e-3 + num_positions * 2.0**-23):
        return None
    table = torch.cat([angle.cos(), -angle.sin()], dim=1).to(torch.float32)
    return Rope(table.to(rotary.cos_sin_cache.device), rotary.is_neox_style)


ROTATED = (RotaryEmbedding, LinearScalingRotaryEmbedding, Llama3RotaryEmbedding)
"""Embeddings whose keys are rotated: each with a test. Others scale, or change with the length."""


ROTATED_NEXT_TO_WINDOWS = frozenset({"gemma2", "gemma3_text", "mistral", "olmo3", "qwen3"})
"""Models with sliding windows that rotate queries of full attention, too. Others have the rotary
embedding there and leave it out: Cohere 2, EXAONE 4."""


def rotaries(
    model: torch.nn.Module,
) -> Iterator[tuple[str, HeavyHitterImpl, list[RotaryEmbeddingBase]]]:
    """Each of the policy's attention layers, and the rotary embeddings next to it.

    Args:
        model: vLLM's.

    Yields:
        The name of the module that has them, the layer's attention, the embeddings.

    """
    for name, module in model.named_modules():
        children = list(module.children())
        for layer in children:
            if isinstance(layer, Attention) and isinstance(layer.impl, HeavyHitterImpl):
                found = [child for child in children if isinstance(child, ROTARY)]
                yield name, layer.impl, found


def bind_rotations(model: torch.nn.Module, num_positions: int) -> None:
    """Give each of the policy's attention layers what rotates its keys to earlier positions.

    Args:
        model: vLLM's.
        num_positions: that tokens may have.

    Raises:
        UnsupportedError: when a layer has no rotary embedding, or one that is not known to rotate.

    """
    rotations: dict[int, Rope | None] = {}
    for name, impl, found in rotaries(model):
        if len(found) == 1 and id(found[0]) not in rotations:
            rotations[id(found[0])] = rope_back(found[0], num_positions)
        impl.rope_back = rotations[id(found[0])] if len(found) == 1 else None
        if len(found) == 1 and len(found[0].cos_sin_cache) < num_positions:
            raise UnsupportedError(
                f"positions={num_positions}",
                f"the rotary embedding of {name} has {len(found[0].cos_sin_cache)} positions",
                "later ones have no rotation",
                "give a smaller --kv-policy-config.positions",
            )
        if impl.rope_back is None:
            kinds = ", ".join(type(child).__name__ for child in found)
            known = ", ".join(kind.__name__ for kind in ROTATED)
            raise UnsupportedError(
                "positions='rolling'",
                f"{name} has {kinds or 'no rotary embedding next to its attention'}",
                "what is resident is renumbered by rotating keys, which has been tried with "
                f"{known} alone; positions that are added to the input cannot be rotated",
                "use --kv-policy-config.positions original, or another model",
            )


def bind(model: torch.nn.Module, model_type: str, is_hybrid: bool = False) -> None:
    """Give each of the policy's attention layers the rotation of its own rotary embedding.

    Where a layer has no embedding that can rotate queries, no layer gets one: the ranking goes
    without its rotated term, and the log says so. A hybrid model without any needs none.

    Args:
        model: vLLM's.
        model_type: in the model's config.
        is_hybrid: whether some layers keep states.

    """
    if is_hybrid and not any("Rotary" in type(module).__name__ for module in model.modules()):
        for _, impl, _ in rotaries(model):
            impl.rope = lambda: NOWHERE
        return
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    slides = any(layer.sliding_window is not None for layer in layers)
    is_known = not slides or model_type in ROTATED_NEXT_TO_WINDOWS
    found_all = list(rotaries(model))
    for name, _, found in found_all:
        if len(found) != 1 or not is_known or not _adds_up(found[0]):
            kinds = ", ".join(type(child).__name__ for child in found)
            kinds += "" if is_known else f" that {model_type} may leave out next to windows"
            logger.warning(
                "%s has %s: the second pass, which rotates queries and takes one rotary embedding "
                "that does not scale, is left out.",
                name,
                kinds or "no rotary embedding next to its attention",
            )
            return
    for _, impl, found in found_all:
        impl.rope = partial(rope_of, found[0])


def num_positions(model: torch.nn.Module) -> int:
    """Count the positions that a model's rotary embeddings have a rotation for.

    Args:
        model: vLLM's.

    Returns:
        Rows of the shortest table; 0 where there is none, or one that is not known.

    """
    modules = model.modules()
    all_kinds = [module for module in modules if "RotaryEmbedding" in type(module).__name__]
    known = [module for module in all_kinds if isinstance(module, ROTARY)]
    if len(known) < len(all_kinds):
        return 0
    return min((len(rotary.cos_sin_cache) for rotary in known), default=0)


def _adds_up(rotary: RotaryEmbeddingBase) -> bool:
    """Whether the rotation of position 0 is none: one that also scales would scale twice."""
    cos, sin = rotary.cos_sin_cache[0].chunk(2)
    return bool((cos == 1).all() and (sin == 0).all())


class BindsRopes:
    """Mixed into vLLM's worker class: finds what rotates queries, or keys, where something does.

    Attributes:
        num_positions: see :func:`num_positions`; known where prompts are read again.

    """

    vllm_config: Any
    model_runner: Any
    num_positions = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model; see :func:`bind` and :func:`bind_rotations`."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        config = KVPolicyConfig.of(self.vllm_config)
        if config is not None and config.ranking.term("rotated"):
            found = self.vllm_config.model_config
            model_type, is_hybrid = found.hf_text_config.model_type, found.is_hybrid
            bind(self.model_runner.get_model(), model_type, is_hybrid)
        if config is not None and config.ranking.term("reread"):
            self.num_positions = num_positions(self.model_runner.get_model())
        if config is not None and config.position_limit is not None:
            bind_rotations(self.model_runner.get_model(), config.position_limit)
