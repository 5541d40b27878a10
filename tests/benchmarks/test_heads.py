"""A model without groups of query heads says what the model with them says."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.quality.heads import ungrouped


def test_ungrouped(tmp_path: Path) -> None:
    """Six query heads of two KV heads become six of six; logits stay."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
    )
    grouped = LlamaForCausalLM(config)
    grouped.save_pretrained(tmp_path / "grouped")
    target = ungrouped(tmp_path / "grouped", tmp_path / "ungrouped")
    alone = AutoModelForCausalLM.from_pretrained(target)
    assert alone.config.num_key_value_heads == 6
    assert alone.model.layers[0].self_attn.k_proj.weight.shape == (48, 48)
    tokens = torch.randint(64, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(alone(tokens).logits, grouped(tokens).logits)
