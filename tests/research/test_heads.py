# SPDX-License-Identifier: Apache-2.0
"""A model without groups of query heads says what the model with them says."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from research.heads import ungrouped
from tests.e2e.harness import tiny_llama


def test_ungrouped_heads_keep_their_logits(tmp_path: Path) -> None:
    """Six query heads of two KV heads become six of six; logits stay."""
    source = tiny_llama(tmp_path / "grouped", 6, 2)
    target = ungrouped(Path(source), tmp_path / "ungrouped")
    grouped = AutoModelForCausalLM.from_pretrained(source)
    alone = AutoModelForCausalLM.from_pretrained(target)
    assert alone.config.num_key_value_heads == 6
    assert alone.model.layers[0].self_attn.k_proj.weight.shape == (192, 192)
    tokens = torch.randint(256, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(alone(tokens).logits, grouped(tokens).logits)
