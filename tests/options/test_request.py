# SPDX-License-Identifier: Apache-2.0
"""A request's own budget: how it is read, its slots, and refusals."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from vllm_h2o.errors import ConfigError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.request import asked_budget, asks_to_save, budget_of, check_request
from vllm_h2o.policy import Budget


def capacity(config: KVPolicyConfig, asked: Any, prompt_len: int = 100, more: int = 50) -> int:
    """Return the slots of a request, in an engine of 1024 tokens and pages of 16."""
    budget = budget_of(config, 1024, 16, prompt_len, more, asked_budget({"kv_budget": asked}))
    assert isinstance(budget, Budget)
    return budget.capacity


@pytest.mark.parametrize(
    ("options", "asked", "expected"),
    [
        ({}, 64, 64),
        ({}, 65, 80),
        ({}, "64", 64),
        ({}, 0.5, 512),
        ({}, "0.5", 512),
        ({}, 1.0, 1024),
        ({}, "full", 1024),
        ({"budget": "full"}, 0.1, 112),
        ({"budget_basis": "prompt"}, 0.5, 64),
        ({"budget_basis": "request"}, 0.5, 80),
        ({"budget_basis": "request"}, 512, 512),
        ({"budget_basis": "prompt"}, "full", 1024),
        ({"min_budget": 100}, 64, 112),
        ({"max_budget": 128}, 128, 128),
        ({"max_budget": 0.5}, 0.5, 512),
        ({"evict_every": "page"}, 17, 32),
        ({"name": "full"}, "full", 1024),
    ],
)
def test_request_budget_comes_to_slots(options: dict[str, Any], asked: Any, expected: int) -> None:
    """As ``budget`` does, whatever the engine's own is."""
    assert capacity(KVPolicyConfig(**options), asked) == expected


def test_request_budget_of_one_slot_is_not_every_token() -> None:
    """1 and 1.0 are equal in Python, and different budgets."""
    assert capacity(KVPolicyConfig(), 1.0) == 1024
    with pytest.raises(ConfigError, match="kv_budget=1 is not supported: it is 1 slot"):
        capacity(KVPolicyConfig(), 1)


@pytest.mark.parametrize(
    ("options", "extra_args", "message"),
    [
        ({}, {"kv_budget": 0}, "kv_budget=0 is not supported: budget takes a whole number from 1"),
        ({}, {"kv_budget": "half"}, "kv_budget='half' is not supported: budget takes"),
        ({}, {"kv_budget": True}, "kv_budget=True is not supported: its type is bool"),
        ({}, {"kv_budget": [1]}, "kv_budget=[1] is not supported: its type is list"),
        ({}, {"KV-Budget": 64}, "'KV-Budget' in a request is not supported: the key of"),
        ({}, {"kv_bugdet": 64}, "'kv_bugdet' in a request is not supported: the key of"),
        ({}, {"kv_budget": "\u0663\u0662"}, "budget takes a whole number from 1"),
        ({}, {"kv_budget": 1}, "budget=1 is one token, and full is every token"),
        ({"num_sink_tokens": 70}, {"kv_budget": 64}, "kv_budget=64 is not supported: it is 64"),
        ({"num_sink_tokens": 70}, {"kv_budget": 0.01}, "kv_budget=0.01 is not supported: it is 11"),
        ({"max_budget": 128}, {"kv_budget": 129}, "it is 129 slots. max_budget=128 is 128 slots."),
        ({"max_budget": 0.5}, {"kv_budget": "full"}, "it is 1024 slots. max_budget=0.5 is 512"),
        ({"evict_every": "page"}, {"kv_budget": 16}, "need 32 slots in pages of 16"),
        ({"name": "full"}, {"kv_budget": 64}, "kv_budget=64 is not supported: full keeps every"),
    ],
)
def test_request_budget_is_refused(
    options: dict[str, Any], extra_args: dict[str, Any], message: str
) -> None:
    """The message names the request's own budget."""
    with pytest.raises(ConfigError) as caught:
        budget_of(KVPolicyConfig(**options), 1024, 16, 100, 50, asked_budget(extra_args))
    assert message in str(caught.value)


def check(
    options: dict[str, Any] | None,
    extra_args: dict[str, Any] | None,
    pages: int | None = None,
    images: Sequence[MultiModalFeatureSpec] = (),
    engines: int = 1,
    resumable: bool = False,
    adapter: object = None,
    embeds: object = None,
) -> None:
    """Send a request of 100 + 50 tokens to an engine of 1024."""
    params = SimpleNamespace(extra_args=extra_args, max_tokens=50)
    request = SimpleNamespace(
        sampling_params=params,
        prompt_token_ids=[1] * 100,
        mm_features=images,
        resumable=resumable,
        lora_request=adapter,
        prompt_embeds=embeds,
    )
    parallel = SimpleNamespace(
        data_parallel_size=engines,
        data_parallel_size_local=1,
        data_parallel_rank_local=None,
        local_engines_only=False,
    )
    config = SimpleNamespace(
        additional_config={} if options is None else {"kv_policy": {"name": "h2o", **options}},
        model_config=SimpleNamespace(max_model_len=1024),
        cache_config=SimpleNamespace(
            block_size=16, effective_attention_block_size=16, num_gpu_blocks=pages
        ),
        parallel_config=parallel,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
    )
    assert check_request(request, config, encoder_room=60) is request


def test_check_request_reads_its_budget_alone() -> None:
    """Without a policy nothing would read a budget."""
    check(None, None)
    check({}, {"other": 1})
    check({}, {"kv_budget": 64})
    with pytest.raises(ConfigError, match="the engine has no kv-policy"):
        check(None, {"kv_budget": 64})


@pytest.mark.parametrize(
    "key",
    ["budget", "max_budget", "min-budget", "budget_basis", "kv_policy", "--kv-policy",
     "kv_policy_config", "kv_policy_config.budget", "kv-policy-config.Budget", "evict_every"],
)  # fmt: skip
def test_request_that_names_an_option_is_refused(key: str) -> None:
    """Nothing would read it. Without a policy, another plugin may."""
    with pytest.raises(ConfigError, match=re.escape(f"{key!r} in a request")) as caught:
        check({}, {key: 64})
    assert "Give 'kv_budget'" in str(caught.value)
    check(None, {key: 64})


FOLDER = {"continuation": "/kept"}


@pytest.mark.parametrize("asked", [0, 1, "0", "1", True, False])
def test_wish_to_be_kept_is_a_switch(asked: object) -> None:
    """However JSON or a command line writes it."""
    check(FOLDER, {"kv_save": asked})
    check(FOLDER, {"kv_save": asked, "kv_budget": 64})
    request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"kv_save": asked}))
    assert asks_to_save(request) == (asked in (1, "1", True))


@pytest.mark.parametrize(
    ("options", "extra_args", "given", "message"),
    [
        (FOLDER, {"kv_save": "manual"}, {}, "kv_save='manual' is not supported: it takes 1 or 0"),
        (FOLDER, {"kv_save": [1]}, {}, "kv_save=[1] is not supported: it takes 1 or 0"),
        (FOLDER, {"kv-save": 1}, {}, "'kv-save' in a request is not supported: the key of"),
        ({"continuation": True}, {"kv_save": 1}, {}, "the engine has no folder"),
        (None, {"kv_save": 1}, {}, "the engine has no folder"),
        (FOLDER, {"kv_save": 1}, {"adapter": object()}, "the request has a LoRA adapter"),
        (FOLDER, {"kv_save": 1}, {"images": [object()]}, "the request has images"),
        (FOLDER, {"kv_save": 1}, {"embeds": object()}, "the request has prompt embeddings"),
        (FOLDER, {"kv_save": 1}, {"resumable": True}, "the request has more parts to come"),
    ],
)
def test_wish_to_be_kept_is_refused(
    options: Any, extra_args: Any, given: dict[str, Any], message: str
) -> None:
    """What no later engine could continue from."""
    with pytest.raises(ConfigError) as caught:
        check(options, extra_args, **given)
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["merge", "score", "positions", "session_id", "my_budgets"])
def test_key_of_another_plugin_is_taken(key: str) -> None:
    """A word that others use as well."""
    check({}, {key: 1})


def test_check_request_refuses_more_pages_than_the_pool_has() -> None:
    """With eviction=chunk, the pool may be smaller than a longest sequence."""
    options, full = {"eviction": "chunk", "budget": 32}, {"kv_budget": "full"}
    check(options, full, pages=11)
    with pytest.raises(ConfigError, match="may need 10 pages. The pool has 9."):
        check(options, full, pages=10)
    # vLLM adds up the pages of all engines; a session may grow to the longest sequence.
    check(options, full, pages=22, engines=2)
    with pytest.raises(ConfigError, match="may need 10 pages. The pool has 9."):
        check(options, full, pages=20, engines=2)
    with pytest.raises(ConfigError, match="may need 64 pages. The pool has 10."):
        check(options, full, 11, resumable=True)
    check(options, {"kv_budget": 32}, pages=10)


def image(name: str, offset: int, length: int) -> MultiModalFeatureSpec:
    """Return vLLM's description of an image."""
    return MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))


def test_check_request_refuses_images_that_the_encoder_cannot_hold() -> None:
    """Images in the observation window count, each once."""
    window = {"name": "snapkv", "observation_window": 32}
    check(window, None, images=[image("a", 0, 60), image("b", 70, 30)])
    check(window, None, images=[image("a", 5, 40), image("a", 50, 40)])
    both = [image("a", 9, 60), image("b", 70, 30)]
    check({}, None, images=both)
    check(None, None, images=both)
    with pytest.raises(ConfigError, match="2 images .* 32 tokens .* 90 embeddings, .* holds 60"):
        check(window, None, images=both)
