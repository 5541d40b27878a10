"""Prompts that are read again, and layers that share slots: what they go with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.options.refusal import READ_AGAIN_REFUSED, refusal
from tests.tiny_models import engine_config, folder
from vllm_h2o.errors import UnsupportedError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.refusals import REFUSALS
from vllm_h2o.policy.scores import SCORES

DRAFTED = {"window_lifetime": 0, "evict_every": 4}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({"name": "h2o2"}, (True, False)),
        ({"name": "h2o2", "score": "reconstruction"}, (True, True)),
        ({"name": "h2o2", "score": "reconstruction", "split_layers": False}, (True, False)),
        ({"name": "h2o2", "score": "reconstruction", "split": False}, (False, False)),
        ({"name": "h2o2", "score": "reconstruction", "prefill": "chunked"}, (False, False)),
        ({"name": "h2o2", "split_layers": True}, (True, True)),
        ({"name": "h2o", "score": "reconstruction"}, (False, False)),
        ({"name": "h2o", "score": "sum", "split": True, "split_layers": True}, (True, True)),
    ],
)
def test_who_shares_slots(options: dict[str, Any], shares: tuple[bool, bool]) -> None:
    """Layers do where the second reading says which of them matter, if heads may at all."""
    config = KVPolicyConfig(**options)
    assert (config.splits, config.splits_layers) == shares


def test_which_scores() -> None:
    """One of them; it is the only one for which nothing needs to rotate."""
    assert [name for name, score in SCORES.items() if score.reads_again] == ["reconstruction"]


def test_what_has_nothing_to_do() -> None:
    """Layers that share slots in equal parts, and `h2o2` with a score that asks for nothing."""
    asked = refusal(name="h2o", split_layers=True)
    assert "asked: split_layers=true; is: split=False: each KV head has as many slots" in asked
    asked = refusal(name="h2o2", score="mean_squares")
    assert "asked: score='mean_squares' with policy 'h2o2'; is: 'h2o2' keeps what the" in asked


@pytest.mark.parametrize(
    ("what", "model", "settings", "options"),
    [
        (0, "LlamaForCausalLM", {"enable_lora": True}, {}),
        (1, "LlamaForCausalLM", {"pipeline_parallel_size": 2}, {"split": False}),
        (1, "LlamaForCausalLM", {"speculative_config": NGRAM}, DRAFTED),
        (2, "Gemma3ForCausalLM", {}, {"split": False}),
        (2, "LlamaForCausalLM", {"enable_prompt_embeds": True}, {}),
        (3, "LlamaForCausalLM", {"enable_prefix_caching": True}, {"score": "sum"}),
        (3, "LlamaForCausalLM", {"pipeline_parallel_size": 2}, {}),
        (3, "Gemma3ForCausalLM", {}, {}),
    ],
)
def test_refused(
    tmp_path: Path, what: int, model: str, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    """Each with its reason and its remedy, at the start."""
    (refused,) = [each for each in REFUSALS if each.what == READ_AGAIN_REFUSED[what]]
    options = {"budget": 64, **options}
    policy = "h2o2"
    if options.get("score") == "sum":
        policy, options = "h2o", {**options, "split": True, "split_layers": True}
        options["prefill"] = "window"
    else:
        options["score"] = "reconstruction"
    with pytest.raises(UnsupportedError) as caught:
        engine_config(
            folder(tmp_path, model), kv_policy=policy, kv_policy_config=options, **settings
        )
    assert f"is: the engine has {refused.what}; why not: {refused.why};" in str(caught.value)
