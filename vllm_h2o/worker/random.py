"""Initial scores of the ``random`` policy, and which KV heads of the model this rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index

from vllm_h2o.kernels.batch import DecodeBatch, PromptChunk
from vllm_h2o.kernels.torch.random import random_scores
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.policy import ScoreKind


def heads_of_rank(vllm_config: VllmConfig, num_kv_heads: int) -> range:
    """Which of the whole model's KV heads this tensor-parallel rank has, ``num_kv_heads`` of them.

    Where there are more ranks than heads, neighbours have the same one.
    """
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    if num_ranks == 1:
        return range(num_kv_heads)
    total = vllm_config.model_config.get_total_num_kv_heads()
    start = get_tensor_model_parallel_rank() * total // num_ranks
    return range(start, start + num_kv_heads)


@dataclass(frozen=True)
class RandomScores:
    """What tokens are stored with: a number for each (seed, layer, KV head, position).

    Args:
        heads: indices of this rank's H KV heads in the whole model.

    """

    heads: range

    @classmethod
    def of(cls, vllm_config: VllmConfig, num_kv_heads: int) -> RandomScores | None:
        """Those of a rank; None for a policy that is not ``random``."""
        if KVPolicyConfig.required(vllm_config).policy.score is not ScoreKind.RANDOM:
            return None
        return cls(heads_of_rank(vllm_config, num_kv_heads))

    def of_step(
        self,
        layer_name: str,
        decodes: Sequence[DecodeBatch],
        chunks: Sequence[PromptChunk],
        num_tokens: int,
        device: torch.device,
    ) -> torch.Tensor:
        """[num_tokens, H], float32: of every token of a step."""
        scores = torch.zeros(num_tokens, len(self.heads), device=device)
        layer = extract_layer_index(layer_name)
        for batch in decodes:
            seed, position = batch.field("seed"), batch.field("logical_start")
            scores.index_copy_(
                0, batch.field("token"), random_scores(seed, layer, self.heads, position)
            )
        for chunk in chunks:
            scores[chunk.tokens] = self.up_to(layer_name, chunk, device)[chunk.logical_start :]
        return scores

    def up_to(self, layer_name: str, chunk: PromptChunk, device: torch.device) -> torch.Tensor:
        """[logical_end, H], float32: of every token up to a chunk's end."""
        position = torch.arange(chunk.logical_end, device=device)
        seed = torch.full_like(position, chunk.seed)
        return random_scores(seed, extract_layer_index(layer_name), self.heads, position)
