# SPDX-License-Identifier: Apache-2.0
"""Conversations in a real engine, each followed by one reference from its first turn on."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, RequestOutput

from tests.e2e.harness import engine, generate, shrink_terms
from tests.e2e.oracle import Oracle, Where
from tests.e2e.ties import WatchedHead
from vllm_h2o.policy import Budget
from vllm_h2o.wire import RequestPlan

SMALL = {"block_size": 16, "num_gpu_blocks_override": 120, "max_num_batched_tokens": 128}


@dataclass
class ConversationOracle(Oracle):
    """Lets the reference of an earlier request go on, found by the text that it has computed.

    Args:
        computed: of each request, itself, how many of its tokens are computed, and its budget.
        num_turns: references that went on, in each layer and KV head.

    """

    computed: dict[str, tuple[Any, int, Budget]] = field(default_factory=dict)
    num_turns: int = 0

    def follow(self, step: Any, *args: Any) -> None:
        """One layer of one step, and how far it came."""
        super().follow(step, *args)
        for request_id, plan in step.plan.requests.items():
            request = self.requests[request_id]
            self.computed[request_id] = request, plan.logical_end, plan.budget

    def _next_turn(self, where: Where, plan: RequestPlan) -> WatchedHead:
        layer, head, request_id = where
        text = self.requests[request_id].all_token_ids[: plan.logical_start]
        earlier = [
            self.heads[layer, head, other]
            # Ahead of the tokens the last one was not known when it was computed.
            for other, (request, end, budget) in self.computed.items()
            if other != request_id and list(request.all_token_ids[:end]) == list(text)
            if budget == plan.budget
        ]
        self.num_turns += 1
        turn = deepcopy(earlier[-1])
        if self.requests[request_id].num_prompt_tokens > plan.logical_start + 1:
            turn.begin_turn(in_chunks=not plan.is_split)
        return turn


def own_text(seed: int, length: int) -> list[int]:
    """Tokens that nobody else says."""
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def starts(
    model: str, folder: Path, policy: str = "h2o", options: Any = None, **engine_args: Any
) -> Any:
    """An engine with a folder."""
    own = {"budget": 64, **(options or {}), "continuation": str(folder)}
    return engine(model, policy, own, **{**SMALL, **engine_args})


def talkative(patch: pytest.MonkeyPatch, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an engine whose turns continue; ``lifetime`` is that of the policy's last term."""
    own = {"budget": 64, "continuation": True, **options}
    shrink_terms(patch, lifetime=own.pop("lifetime", 9))
    return own


def likely(output: RequestOutput) -> list[tuple[int, float]]:
    """Each token of an answer, and its log-probability."""
    (answer,) = output.outputs
    assert answer.logprobs is not None
    each = zip(answer.token_ids, answer.logprobs, strict=True)
    return [(token, chances[token].logprob) for token, chances in each]


def converse(
    llm: LLM, texts: Sequence[list[int]], turns: Sequence[int], max_tokens: int, **params: Any
) -> list[list[RequestOutput]]:
    """Several conversations at once, each turn with what was said so far and something new.

    Args:
        llm: the engine.
        texts: what each begins with; written: all that was said.
        turns: tokens that are new in each later turn.
        max_tokens: of each answer.
        params: of sampling.

    Returns:
        The answers of each turn.

    """
    said = [generate(llm, texts, max_tokens, **params)]
    for turn, num_new in enumerate(turns):
        for index, (text, output) in enumerate(zip(texts, said[-1], strict=True)):
            text += [*output.outputs[0].token_ids, *own_text(100 * turn + index, num_new)]
        said.append(generate(llm, texts, max_tokens, **params))
    return said


def in_pieces(
    llm: LLM, prompt: list[int], ends: Sequence[int], fill: int = 0, **extra_args: Any
) -> list[tuple[int, float]]:
    """An answer of 40 tokens by requests, of which the first ones end after so many tokens.

    Each is followed by another request with a prompt of ``fill`` tokens, if that is not 0.
    """
    said: list[tuple[int, float]] = []
    for start, end in zip((0, *ends), (*ends, 40), strict=True):
        text = [*prompt, *(token for token, _ in said)]
        (output,) = generate(llm, [text], end - start, logprobs=1, extra_args=extra_args)
        assert output.num_cached_tokens == (len(text) - 1 if start else 0)
        said += likely(output)
        if fill:
            generate(llm, [own_text(2 + start, fill)], 2)
    return said
