"""What conversations that are continued go with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.options.refusal import CONTINUATION_REFUSED, refusal
from tests.tiny_models import engine_config, folder
from vllm_h2o.errors import UnsupportedError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.policy import POLICIES

DRAFTS, WINDOWS = CONTINUATION_REFUSED
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


def test_every_policy_that_evicts() -> None:
    """Off unless it is asked for; heads do not share slots then."""
    for name, policy in POLICIES.items():
        if policy.evicts:
            assert not KVPolicyConfig(name).continuation
            config = KVPolicyConfig.from_options(name, '{"continuation": true}')
            assert config.continuation and not config.splits
    assert "would be a silent no-op" in refusal("full", '{"continuation": true}')
    assert "give true or false, in lower case" in refusal(continuation="yes")


@pytest.mark.parametrize(
    ("architecture", "options", "settings", "what"),
    [
        ("LlamaForCausalLM", {"evict_every": 4}, {"speculative_config": NGRAM}, DRAFTS),
        ("Gemma3ForCausalLM", {}, {"block_size": 32}, WINDOWS),
    ],
)
def test_engines_that_are_refused(
    architecture: str, options: dict[str, Any], settings: dict[str, Any], what: str, tmp_path: Path
) -> None:
    """Where either alone is fine."""
    model = folder(tmp_path, architecture)
    for continuation in (False, True):
        own = {"name": "h2o", "budget": 64, "continuation": continuation, **options}
        arguments = {"max_model_len": 256, "additional_config": {"kv_policy": own}, **settings}
        if continuation:
            with pytest.raises(UnsupportedError, match=f"the engine has {what}"):
                engine_config(model, **arguments)
        else:
            engine_config(model, **arguments)
