# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: attention sinks in the layers that the policy evicts from, and windows in the others."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import RequestOutput
from vllm.model_executor.models.utils import extract_layer_index

from tests.e2e.harness import (
    CHARACTERS,
    Probe,
    assert_same_tokens,
    engine,
    generate,
    tiny_gpt_oss,
    token_ids,
)
from tests.e2e.oracle import Oracle
from vllm_h2o.worker.attention import HeavyHitterImpl

PROMPTS = [CHARACTERS[n : n + n] for n in (5, 33, 90, 150)]
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 8}
MAX_TOKENS = 24
WHOLE = {"kv_budget": "full"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One for all tests."""
    return tiny_gpt_oss(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def said(model: str) -> dict[str, list[RequestOutput]]:
    """By vLLM itself; with a full budget, with a small one, and with a full one without sinks."""
    with engine(model, **SETTINGS) as llm:
        outputs = {"stock": generate(llm, PROMPTS, MAX_TOKENS, logprobs=2)}
    with (
        pytest.MonkeyPatch.context() as patch,
        engine(model, "h2o", {"budget": 32}, **SETTINGS) as llm,
    ):
        probe = Probe(llm)
        outputs["whole"] = generate(llm, PROMPTS, MAX_TOKENS, logprobs=2, extra_args=WHOLE)
        outputs["less"] = generate(llm, PROMPTS, MAX_TOKENS)
        patch.setattr(HeavyHitterImpl, "sink_logits", None)
        outputs["bare"] = generate(llm, PROMPTS, MAX_TOKENS, logprobs=2, extra_args=WHOLE)
        assert probe.num_free == probe.num_total
    return outputs


def test_a_full_budget_gives_stock_s_tokens(said: dict[str, list[RequestOutput]]) -> None:
    """As likely as there, too; a small budget gives others."""
    stock, whole = said["stock"], said["whole"]
    assert assert_same_tokens(stock, whole) == 0
    assert min(len(set(tokens)) for tokens in token_ids(stock)) >= 5
    for pair in zip(stock, whole, strict=True):
        theirs, ours = (output.outputs[0].cumulative_logprob for output in pair)
        assert ours == pytest.approx(theirs, abs=1e-3)
    assert token_ids(said["less"]) != token_ids(stock)


def test_sinks_that_are_left_out_are_noticed(said: dict[str, list[RequestOutput]]) -> None:
    """They matter: without them the tokens are not stock's."""
    with pytest.raises(AssertionError):
        assert_same_tokens(said["stock"], said["bare"])


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("h2o", {}),
        ("h2o", {"kernels": "torch", "recent_ratio": 0.25, "num_sink_tokens": 3}),
        ("snapkv", {"observation_window": 20}),
        ("h2o", {"eviction": "chunk", "merge": 0.3}),
        ("h2o2", {"observation_window": 20, "merge": 0.3}),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_what_is_kept(
    policy: str, options: dict[str, Any], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the reference keeps, which knows the sinks; in the layer with full attention alone."""
    options = {"budget": 64, **options}
    with engine(model, policy, options, **SETTINGS) as llm:
        probe = Probe(llm)
        oracle = Oracle(probe.scheduler).install(monkeypatch)
        generate(llm, PROMPTS, MAX_TOKENS)
        assert probe.num_free == probe.num_total
    assert {extract_layer_index(layer) for layer, _, _ in oracle.retained} == {1}
    assert oracle.num_victims > 0
    assert oracle.num_ties <= max(oracle.num_victims / 1000, 1)
    assert oracle.max_error < 1e-4
    assert (oracle.num_merged > 0) is oracle.scheduler.policy_config.merges
