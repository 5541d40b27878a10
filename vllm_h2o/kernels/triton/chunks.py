# SPDX-License-Identifier: Apache-2.0
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
        windows: [R], int64: addresses of the chunks' ``window_scores``; 0 where there are none.

    """

    source: Sequence[PromptChunk]
    block_table: torch.Tensor
    fields: torch.Tensor
    windows: torch.Tensor

    @classmethod
    def of(
        cls, source: Sequence[PromptChunk], names: Sequence[str], device: torch.device
    ) -> DeviceChunks:
        """Send the attributes ``names`` of the chunks. No synchronisation."""
        rows = [[attrgetter(name)(chunk) for chunk in source] for name in names]
        pins = device.type == "cuda"
        host = torch.tensor(rows, dtype=torch.int32, pin_memory=pins)
        block_table = torch.stack([chunk.block_table for chunk in source])
        written = [chunk.window_scores for chunk in source]
        windows = torch.tensor([0 if w is None else w.data_ptr() for w in written], pin_memory=pins)
        sent = (each.to(device, non_blocking=True) for each in (host, windows))
        return cls(source, block_table, *sent)

    def __len__(self) -> int:
        return len(self.source)
