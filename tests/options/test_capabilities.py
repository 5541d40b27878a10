# SPDX-License-Identifier: Apache-2.0
"""Capabilities: which parts go together, and what a refusal says."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_h2o.errors import ConfigError
from vllm_h2o.options.capabilities import (
    ENGINE_PARTS,
    OPTION_PARTS,
    Property,
    find_conflict,
    parts_on,
)
from vllm_h2o.options.config import KVPolicyConfig

OPTIONS: dict[str, dict[str, Any]] = {
    "all": {"name": "h2o"},
    "rotated": {"name": "h2o2", "score": "combined"},
    "reread": {"name": "h2o2", "score": "reconstruction"},
    "window": {"name": "snapkv"},
    "unranked": {"name": "streaming"},
    "chunk": {"eviction": "chunk"},
    "pressure": {"eviction": "pressure"},
    "every": {"evict_every": 8},
    "page": {"evict_every": "page"},
    "heads": {"split": "heads"},
    "layers": {"split": "layers"},
    "merge": {"merge": 0.9},
    "rolling": {"positions": "rolling", "eviction": "chunk"},
    "continuation": {"continuation": True},
    "folder": {"continuation": "/kept"},
    "basis": {"budget_basis": "prompt"},
    "slots": {"budget": 64},
}
"""Name of a part -> the fewest options that switch it on."""
ENGINE: dict[str, dict[str, dict[str, Any]]] = {
    "prefix": {"cache_config": {"enable_prefix_caching": True}},
    "connector": {"": {"kv_transfer_config": object()}},
    "drafts": {"": {"speculative_config": object()}},
    "sliding": {"model_config": {"window": 16, "layer_types": ["sliding_attention", "full"]}},
    "states": {"model_config": {"is_hybrid": True}},
    "replay": {"cache_config": {"use_replayssm": True}},
    "stages": {"parallel_config": {"pipeline_parallel_size": 2}},
    "nodes": {"parallel_config": {"nnodes": 2}},
    "lora": {"": {"lora_config": object()}},
    "images": {"model_config": {"is_multimodal_model": True}},
    "mrope": {"model_config": {"uses_mrope": True}},
    "embeds": {"model_config": {"enable_prompt_embeds": True}},
    "fp8": {"cache_config": {"cache_dtype": "fp8"}},
    "no_rotary": {"model_config": {"no_rope_layers": [0]}},
}
"""Name of a part -> the fields of VllmConfig that switch it on."""

CONFLICTS: dict[str, set[str]] = {
    "prefix": {"states"},
    "all": {"prefix"},
    "rotated": {"prefix", "rolling"},
    "reread": {"prefix", "rolling", "drafts", "sliding", "stages", "lora", "images", "mrope"}
    | {"embeds", "states"},
    "chunk": {"heads", "layers", "prefix"},
    "pressure": {"heads", "layers", "continuation", "folder", "prefix", "drafts"},
    "every": {"heads", "layers", "merge"},
    "page": {"heads", "layers", "merge"},
    "heads": {"rolling"},
    "layers": {"rolling", "prefix", "sliding", "states", "stages"},
    "merge": {"rolling", "continuation", "folder", "fp8"},
    "rolling": {"continuation", "folder", "prefix", "drafts", "sliding", "images", "mrope", "fp8"}
    | {"no_rotary"},
    "connector": {"drafts", "sliding", "states", "lora", "images", "mrope", "embeds"},
    "continuation": {"connector", "basis", "drafts", "sliding", "replay"},
    "folder": {"connector", "basis", "drafts", "sliding", "replay", "nodes"},
    "basis": {"slots"},
    "drafts": {"sliding", "states", "stages", "images", "mrope"},
}
"""Name of a part -> the later parts with which it is refused."""


def engine(*names: str) -> SimpleNamespace:
    """Return the fields of VllmConfig that parts read, with some of them on."""
    model: dict[str, Any] = {"window": None, "is_multimodal_model": False, "uses_mrope": False}
    model |= {"enable_prompt_embeds": False, "is_hybrid": False, "multimodal_config": None}
    cache: dict[str, Any] = {"enable_prefix_caching": False, "cache_dtype": "auto"}
    cache |= {"use_replayssm": False}
    groups: dict[str, dict[str, Any]] = {
        "": {"speculative_config": None, "lora_config": None, "quant_config": None}
        | {"kv_transfer_config": None},
        "cache_config": cache,
        "model_config": model,
        "parallel_config": {"pipeline_parallel_size": 1, "nnodes": 1}
        | {"distributed_executor_backend": None},
    }
    for name in names:
        for group, changed in ENGINE[name].items():
            groups[group] |= changed
    hf = {key: model[key] for key in ("layer_types", "no_rope_layers") if key in model}
    model["get_sliding_window"] = lambda: model["window"]
    model["hf_text_config"] = SimpleNamespace(to_dict=lambda: hf)
    own = groups.pop("")
    return SimpleNamespace(**own, **{name: SimpleNamespace(**g) for name, g in groups.items()})


def refused(*names: str) -> tuple[str, ...] | None:
    """Return the four parts with which these parts are refused together, or None."""
    options: dict[str, Any] = {"name": "snapkv"}
    for name in names:
        options |= OPTIONS.get(name, {})
    try:
        config = KVPolicyConfig(**options)
    except ConfigError as error:
        return error.args
    made = engine(*(name for name in names if name in ENGINE))
    return find_conflict(config.within(made).setup(made))


def meets(*names: str) -> bool:
    """Whether parts can be switched on at once: no two of them set one option differently."""
    chosen = [OPTIONS.get(name, {}) for name in names]
    return all(
        one[key] == other[key]
        for one, other in combinations(chosen, 2)
        for key in one.keys() & other.keys()
    )


UNREAD = {("unranked", "heads"), ("unranked", "layers")}
"""Options that the policy does not read."""
PAIRS = [
    pair for pair in combinations([*OPTIONS, *ENGINE], 2) if meets(*pair) and pair not in UNREAD
]


@pytest.mark.parametrize("name", [*OPTIONS, *ENGINE])
def test_part_alone_is_taken(name: str) -> None:
    """Each works without the others."""
    assert refused(name) is None


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_pair_is_refused_as_properties_say(pair: tuple[str, str]) -> None:
    """The table above is what a user may rely upon."""
    one, other = pair
    assert (refused(*pair) is not None) == (other in CONFLICTS.get(one, ()))


def test_every_part_is_on_in_a_test() -> None:
    """No row of the tables is there unread."""
    seen: set[int] = set()
    for name in [*OPTIONS, *ENGINE]:
        config = KVPolicyConfig(**OPTIONS.get(name, {}))
        setup = config.setup(engine(*({name} & ENGINE.keys())))
        seen |= {id(part) for part in parts_on(setup)}
    assert [part.name for part in (*OPTION_PARTS, *ENGINE_PARTS) if id(part) not in seen] == []


def test_every_property_is_needed_and_broken() -> None:
    """A property that only one side names refuses nothing."""
    parts = (*OPTION_PARTS, *ENGINE_PARTS)
    needed = {wanted for part in parts for wanted in part.needs}
    broken = {wanted for part in parts for wanted in part.breaks}
    assert needed == broken == set(Property)


BEGAN: list[tuple[str, ...]] = [
    ("rotated", "page"),
    ("rotated", "page", "pressure"),
    ("reread", "page"),
    ("all", "page", "basis"),
    ("all", "page", "rolling"),
    ("all", "page", "drafts"),
    ("window", "chunk"),
    ("window", "rolling"),
    ("unranked", "page"),
    ("rotated", "every", "drafts"),
]
"""Parts that were refused together before they had properties."""


@pytest.mark.parametrize("names", BEGAN, ids="-".join)
def test_parts_that_began_to_go_together_are_taken(names: tuple[str, ...]) -> None:
    """Nothing that one of them needs is broken by another."""
    assert refused(*names) is None


def test_page_goes_with_means() -> None:
    """A page's rank is the sum of its tokens' ranks, whatever these are."""
    assert KVPolicyConfig(score="mean", evict_every="page").ranking.by_age


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("merge", "every"),
            "kv-policy: merge=0.9 with evict_every=8 is not supported: merge=0.9 needs evictions "
            "that overwrite one token each. evict_every=8 evicts several tokens at a time. Use "
            "evict_every=1, or leave merge out.",
        ),
        (
            ("rolling", "rotated"),
            "kv-policy: score=combined with positions=rolling is not supported: score=combined "
            "needs tokens that keep their positions. positions=rolling renumbers the tokens of a "
            "request. Use positions=original, or use --kv-policy h2o or snapkv.",
        ),
        (
            ("reread", "lora"),
            "kv-policy: score=reconstruction with LoRA is not supported: score=reconstruction "
            "needs the weights of the base model. LoRA changes weights from request to request. "
            "Leave --enable-lora out, or use score=combined.",
        ),
        (
            ("all", "prefix"),
            "kv-policy: policy h2o with prefix caching is not supported: policy h2o needs every "
            "query of the prompt. Prefix caching does not compute the queries of a cached prefix. "
            "Leave --enable-prefix-caching out, or use --kv-policy h2o2 without a score.",
        ),
    ],
)
def test_refusal_reads_as_sentences(names: tuple[str, str], message: str) -> None:
    """A user learns what is needed, what breaks it, and two ways out."""
    parts = refused(*names)
    assert parts is not None
    assert str(ConfigError(*parts)) == message
