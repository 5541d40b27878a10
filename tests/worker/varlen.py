# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's documented meaning, in plain torch on any device."""

from __future__ import annotations

from typing import Any

import torch


class Varlen:
    """``flash_attn_varlen_func``: causal from the lower right corner, paged or not."""

    def __init__(self) -> None:
        self.num_paged = self.num_calls = 0

    def __call__(self, q: Any, k: Any, v: Any, out: Any, **asked: Any) -> tuple[Any, Any]:
        """Attend each sequence by itself."""
        assert asked["causal"] and asked["return_softmax_lse"] and asked["fa_version"] == 3
        bounds = asked["cu_seqlens_q"].tolist()
        assert asked["cu_seqlens_q"].dtype == torch.int32
        paged = "block_table" in asked
        self.num_calls, self.num_paged = self.num_calls + 1, self.num_paged + paged
        lse = torch.empty(q.shape[1], q.shape[0], device=q.device)
        ends = asked["seqused_k"].tolist() if paged else None
        assert asked["max_seqlen_q"] == max(b - a for a, b in zip(bounds, bounds[1:], strict=False))
        for i, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            if ends is None:
                key, value = k[begin:end], v[begin:end]
            else:
                assert ends[i] <= asked["max_seqlen_k"]
                pages = asked["block_table"][i, : -(-ends[i] // k.shape[1])].long()
                key, value = (t[pages].flatten(0, 1)[: ends[i]] for t in (k, v))
            group = q.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(group, 1) for t in (key, value))
            logits = torch.einsum("thd,jhd->htj", q[begin:end], key) * asked["softmax_scale"]
            num, length = logits.shape[1:]
            key_at = torch.arange(length, device=q.device)
            late = key_at > key_at[length - num :, None]
            logits.masked_fill_(late, float("-inf"))
            lse[:, begin:end] = logits.logsumexp(-1)
            out[begin:end] = torch.einsum("htj,jhd->thd", logits.softmax(-1), value)
        return out, lse
