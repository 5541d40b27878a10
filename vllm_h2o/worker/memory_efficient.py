# SPDX-License-Identifier: Apache-2.0
"""Prompts attended by xformers where there is no FlashAttention: on GPUs before Ampere.

Its ``memory_efficient_attention_forward_requires_grad`` returns the log-sum-exp that scores need,
and has matrix units multiply on Volta and Turing, for which Triton has none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_h2o.kernels.batch import PromptChunk, StepTensors
from vllm_h2o.kernels.cache import LayerCache, first_slots

AMPERE = 8
"""Compute capability from which there is FlashAttention."""
FUNCTION = "memory_efficient_attention_forward_requires_grad"
MASK = "LowerTriangularFromBottomRightMask"
NEEDED = ("query", "key", "value", "attn_bias", "scale")
"""Parameters of the function."""


class XformersUnavailableError(Exception):
    """xformers is not there, or does not have what is needed; says which."""


@dataclass(frozen=True)
class MemoryEfficientPrompt:
    """Attends chunks of prompts, one by one; K and V of a later chunk are gathered from the pages.

    Args:
        function: xformers' :data:`FUNCTION`.
        mask: an instance of its :data:`MASK`: the last query sees the last key.

    """

    function: Callable[..., Any]
    mask: Any

    @classmethod
    def load(cls) -> MemoryEfficientPrompt:
        """Take the function and the mask from the installed xformers.

        Raises:
            XformersUnavailableError: when there is none, or it lacks something.

        """
        try:
            from xformers import ops
            from xformers.ops.fmha import attn_bias
        except (ImportError, OSError) as error:
            raise XformersUnavailableError(f"xformers cannot be imported: {error}") from error
        return cls.of(vars(ops), vars(attn_bias))

    @classmethod
    def of(cls, functions: dict[str, Any], masks: dict[str, Any]) -> MemoryEfficientPrompt:
        """Take them from the names in two of its modules.

        Raises:
            XformersUnavailableError: when something is missing there.

        """
        missing = [
            name for name, where in ((FUNCTION, functions), (MASK, masks)) if name not in where
        ]
        if not missing:
            known = inspect.signature(functions[FUNCTION]).parameters
            missing = [
                f"the parameter {name} of {FUNCTION}" for name in NEEDED if name not in known
            ]
        if missing:
            raise XformersUnavailableError(f"xformers lacks {', '.join(missing)}")
        return cls(functions[FUNCTION], masks[MASK]())

    def try_on(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        """Attend to one token: whether it goes on this device is for xformers to say.

        Args:
            shape: query heads, KV heads, head size.
            dtype: of queries, K and V.
            device: that of the engine.

        Raises:
            XformersUnavailableError: when it does not.

        """
        num_heads, num_kv_heads, head_size = shape
        query = torch.zeros(1, num_heads, head_size, dtype=dtype, device=device)
        key = query[:, :num_kv_heads]
        try:
            _, lse = self._attend(query, key, key, 1.0)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            raise XformersUnavailableError(f"xformers does not take {dtype}: {error}") from error
        if lse.shape != (num_heads, 1):
            raise XformersUnavailableError(f"its log-sum-exp of one token is {tuple(lse.shape)}")

    def __call__(
        self, cache: LayerCache, chunks: Sequence[PromptChunk], tensors: StepTensors
    ) -> torch.Tensor:
        """Attend, and return each query's log-sum-exp, [Hq, T] float32. ``out`` is written."""
        query = tensors.query
        lse = torch.empty(query.shape[1], query.shape[0], device=query.device, dtype=torch.float32)
        for chunk in chunks:
            tokens = chunk.tokens
            key, value = tensors.key[tokens], tensors.value[tokens]
            if chunk.resident_start:
                at = first_slots(cache, chunk.block_table, chunk.attended_len)  # [H, L]
                key, value = (view[at].transpose(0, 1) for view in (cache.key, cache.value))
            out, lse[:, tokens] = self._attend(query[tokens], key, value, tensors.scale)
            tensors.out[tokens] = out
        return lse

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One sequence.

        Args:
            query: [T, Hq, D].
            key: [L, H, D].
            value: [L, H, D].
            scale: of the logits.

        Returns:
            [T, Hq, D], and [Hq, T] float32.

        """
        num_tokens, num_heads, head_size = query.shape
        num_kv_heads = key.shape[1]
        own = [each[None] for each in (query, key, value)]  # B M H K
        if num_heads > num_kv_heads:  # B M G H K: its groups are the KV heads, expanded, not copied
            shape = (-1, -1, -1, num_heads // num_kv_heads, -1)
            grouped = query.unflatten(1, (num_kv_heads, -1))[None]
            own = [grouped, *(each[:, :, :, None].expand(shape) for each in own[1:])]
        out, lse = self.function(*own, attn_bias=self.mask, scale=scale)
        # [B, (G,) H, M], M rounded up to whole tiles.
        return out.view(query.shape), lse.reshape(num_heads, -1)[:, :num_tokens]
