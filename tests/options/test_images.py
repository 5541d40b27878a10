"""What does not go with models that see images, before one is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from vllm.config import ModelConfig

from tests.options.refusal import IMAGES_REFUSED
from tests.tiny_models import engine_config, folder
from vllm_h2o.errors import UnsupportedError
from vllm_h2o.options.traits import MULTIMODAL

ROLLING, DRAFTS = IMAGES_REFUSED
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
ROLLS = {"positions": "rolling", "position_limit": 200, "prefill": "chunked", "budget": 32}


@pytest.mark.parametrize(
    ("options", "settings", "what"),
    [
        (ROLLS, {"max_num_batched_tokens": 64}, ROLLING),
        ({"budget": 32, "evict_every": 4}, {"speculative_config": NGRAM}, DRAFTS),
    ],
)
def test_with_a_model_that_was_tried(
    options: dict[str, Any],
    settings: dict[str, Any],
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LLaVA's text is a Llama's; vLLM says of it that it sees images."""
    model = folder(tmp_path, "LlamaForCausalLM")
    engine_config(model, kv_policy="h2o", kv_policy_config=options, **settings)
    monkeypatch.setattr(ModelConfig, "is_multimodal_model", property(lambda _: True))
    monkeypatch.setitem(MULTIMODAL, "llama", "Llama")
    with pytest.raises(UnsupportedError, match=re.escape(f"the engine has {what}")):
        engine_config(model, kv_policy="h2o", kv_policy_config=options, **settings)
