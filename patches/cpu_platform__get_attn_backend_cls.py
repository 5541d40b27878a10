# SPDX-License-Identifier: Apache-2.0
"""Lets the CPU platform use the attention backend that was selected.

Symbol: vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls
Why no seam: the platform returns its own backend whatever ``attention_config.backend`` says.
What changes: when the out-of-tree backend is selected, that one is returned; else the original's.
Upstream: none yet.
Drop when: the CPU platform honours a selected out-of-tree backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_h2o.patches._patch import Patch, Symbol


def wrap(original: Callable[..., str]) -> Callable[..., str]:
    """``original``, unless the out-of-tree backend is selected."""

    def get_attn_backend_cls(cls: type, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        stock = original(cls, selected_backend, *args, **kwargs)
        chosen = selected_backend is AttentionBackendEnum.CUSTOM
        return selected_backend.get_path() if chosen else stock

    return get_attn_backend_cls


PATCH = Patch(
    Symbol(
        "vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls",
        {"0.32": "6ebdf2153e19", "0.33": "5196ad4605c8"},
    ),
    wrap,
)
