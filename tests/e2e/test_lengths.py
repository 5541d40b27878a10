# SPDX-License-Identifier: Apache-2.0
"""``max_model_len`` that vLLM fits to the memory: nothing is asked about a length on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.harness import engine, generate, tiny_llama
from vllm_h2o.errors import ConfigError

TRAINED = 2048
"""Tokens of the longest sequence that the model knows."""
PAGE = 32
CHUNKS = {"budget": 0.2, "eviction": "chunk"}
CAPPED = {"budget": 0.2, "max_budget": 300}

Started = Callable[..., int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama of a real model's length."""
    return tiny_llama(tmp_path_factory.mktemp("models"), 2, 1, TRAINED)


@pytest.fixture(scope="module")
def started(model: str) -> Started:
    """Start an engine with a pool of some pages, use it; returns its ``max_model_len``."""

    def start(pages: int, options: dict[str, Any], max_model_len: int | None = -1) -> int:
        sizes = {"num_gpu_blocks_override": pages, "max_model_len": max_model_len}
        limits = {"max_num_batched_tokens": 256, "max_num_seqs": 4, "block_size": PAGE}
        with engine(model, "h2o", options, **sizes, **limits) as llm:
            longest = int(llm.model_config.max_model_len)
            (output,) = generate(llm, [[7] * (longest - 9)], 8)
            assert len(output.outputs[0].token_ids) == 8
            scheduler = llm.llm_engine.engine_core.engine_core.scheduler
            assert scheduler.ledger.budget == scheduler.policy_config.resolve(longest, PAGE)
            return longest

    return start


@pytest.mark.parametrize(
    ("pages", "options", "fitted"),
    [
        (2000, CHUNKS, TRAINED),
        (2000, {"budget": 0.2}, TRAINED),
        (5, CHUNKS, 128),
        # A longest prompt is held whole; one page is vLLM's own.
        (38, CAPPED, 1184),
        (38, CAPPED | {"evict_every": "page"}, 1184),
        # 410 tokens of a budget of a fifth, and a chunk, are more than 640.
        (21, CHUNKS, 1920),
        (21, CHUNKS | {"min_budget": 384}, 1920),
    ],
)
def test_auto_length_is_fitted_and_then_checked(
    started: Started, pages: int, options: dict[str, Any], fitted: int
) -> None:
    """The model's length where it fits, however short the lengths are that vLLM tries."""
    assert started(pages, options) == fitted


@pytest.mark.parametrize("options", [CHUNKS, {"budget": 512, "eviction": "chunk"}])
def test_pool_that_is_too_small_has_the_message_of_vllm(
    started: Started, options: dict[str, Any]
) -> None:
    """Five pages: memory is what is short. vLLM looks for a length that would do."""
    message = r"\(2048\).* available KV cache memory .* maximum model length is 128"
    with pytest.raises(ValueError, match=message) as caught:
        started(5, options, None)
    assert not isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("pages", "options", "message"),
    [
        (2000, CAPPED, "it is 410 slots of max_model_len=2048. max_budget=300 is 300 slots"),
        (38, {"min_budget": 1185, "budget": 0.1}, "max_model_len=1184 is the longest sequence"),
        (
            38,
            {"budget": 0.003, "num_sink_tokens": 3},
            "it is 4 slots of max_model_len=1184. 3 sinks",
        ),
    ],
)
def test_fitted_length_is_checked_once_it_is_there(
    started: Started, pages: int, options: dict[str, Any], message: str
) -> None:
    """The message has the fitted length."""
    with pytest.raises(ConfigError, match=message):
        started(pages, options)
