# SPDX-License-Identifier: Apache-2.0
"""A Llama's forward pass in plain torch, layer by layer, so that attention can be replaced."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own custom)
from safetensors.torch import load_file


class Llama:
    """Weights of a Hugging Face folder of the llama architecture, in float32.

    Args:
        folder: with ``config.json`` and ``model.safetensors``.

    """

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.num_layers: int = config["num_hidden_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.num_kv_heads: int = config["num_key_value_heads"]
        self.head_size: int = config["head_dim"]
        self.eps: float = config["rms_norm_eps"]
        self.theta: float = config["rope_parameters"]["rope_theta"]
        weights = load_file(folder / "model.safetensors")
        self.weights = {name: tensor.to(torch.float32) for name, tensor in weights.items()}
        self.scale = self.head_size**-0.5
        tied = self.weights["model.embed_tokens.weight"]
        self.unembedding = self.weights.get("lm_head.weight", tied)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[W, T] token ids -> [W, T, hidden]."""
        return F.embedding(ids, self.weights["model.embed_tokens.weight"])

    def qkv(
        self, layer: int, x: torch.Tensor, start: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of tokens at positions [start, start + T), RoPE applied.

        Args:
            layer: index.
            x: [W, T, hidden].
            start: position of the first token.

        Returns:
            [W, H, G, T, D], [W, H, T, D], [W, H, T, D].

        """
        x = self._norm(x, f"model.layers.{layer}.input_layernorm.weight")
        q, k, v = (self._project(x, layer, f"self_attn.{name}_proj") for name in "qkv")
        shape = (*x.shape[:2], -1, self.head_size)
        q, k, v = (t.view(shape).transpose(1, 2) for t in (q, k, v))
        q, k = self.rotate(q, start), self.rotate(k, start)
        return q.unflatten(1, (self.num_kv_heads, -1)), k, v

    def finish(self, layer: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of a layer: [W, T, hidden] and attention's [W, H, G, T, D] -> [W, T, hidden]."""
        flat = attended.flatten(1, 2).transpose(1, 2).flatten(2)
        x = x + self._project(flat, layer, "self_attn.o_proj")
        y = self._norm(x, f"model.layers.{layer}.post_attention_layernorm.weight")
        gate = F.silu(self._project(y, layer, "mlp.gate_proj"))
        return x + self._project(
            gate * self._project(y, layer, "mlp.up_proj"), layer, "mlp.down_proj"
        )

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] of the last layer -> [..., vocabulary]."""
        x = self._norm(x, "model.norm.weight")
        return F.linear(x, self.unembedding)

    def nll(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """[W, T, hidden] and the [W, T] tokens that follow -> [W, T] nats."""
        rows = [
            F.cross_entropy(self.logits(a), b, reduction="none")
            for a, b in zip(x, ids, strict=True)
        ]
        return torch.stack(rows)

    def _project(self, x: torch.Tensor, layer: int, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"model.layers.{layer}.{name}.weight"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weights[name], self.eps)

    def rotate(self, x: torch.Tensor, start: int, step: int = 1) -> torch.Tensor:
        """[..., T, D], turned as far as positions ``start``, ``start + step``, ... are from 0."""
        return self.turn(x, start + step * torch.arange(x.shape[-2]))

    def turn(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """[..., T, D], turned as far as positions [T] are from 0; below 0, back."""
        half = self.head_size // 2
        inverse = self.theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = position.to(torch.float32)[:, None] * inverse
        cos, sin = angle.cos(), angle.sin()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
