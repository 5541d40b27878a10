"""Chunks of prompts as the kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from vllm_h2o.kernels.batch import PromptChunk


@dataclass(frozen=True)
class DeviceChunks:
    """R chunks on the device.

    Args:
        source: what they were made of.
        block_table: [R, P], int32.
        fields: [F, R], int32: some attributes of each chunk.

    """

    source: Sequence[PromptChunk]
    block_table: torch.Tensor
    fields: torch.Tensor

    @classmethod
    def of(
        cls, source: Sequence[PromptChunk], names: Sequence[str], device: torch.device
    ) -> DeviceChunks:
        """Send the attributes ``names`` of the chunks. No synchronisation."""
        rows = [[attrgetter(name)(chunk) for chunk in source] for name in names]
        host = torch.tensor(rows, dtype=torch.int32, pin_memory=device.type == "cuda")
        block_table = torch.stack([chunk.block_table for chunk in source])
        return cls(source, block_table, host.to(device, non_blocking=True))

    def __len__(self) -> int:
        return len(self.source)
