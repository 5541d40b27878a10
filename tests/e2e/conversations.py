"""Conversations in a real engine, each followed by one reference from its first turn on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from vllm import LLM, RequestOutput

from tests.e2e.harness import generate
from tests.e2e.oracle import Oracle, Where
from vllm_h2o.kernels.reference import Head
from vllm_h2o.wire import RequestPlan

Text = tuple[int, ...]


@dataclass
class ConversationOracle(Oracle):
    """Lets the reference of an earlier request go on, found by the text that it has computed.

    Args:
        texts: of each request, the tokens that it has computed.
        num_turns: references that went on, in each layer and KV head.

    """

    texts: dict[str, Text] = field(default_factory=dict)
    num_turns: int = 0

    def follow(self, step: Any, *args: Any) -> None:
        """One layer of one step, and the texts after it."""
        super().follow(step, *args)
        for request_id, plan in step.plan.requests.items():
            computed = self.scheduler.requests[request_id].all_token_ids[: plan.logical_end]
            self.texts[request_id] = tuple(computed)

    def _next_turn(self, where: Where, plan: RequestPlan) -> Head:
        layer, head, request_id = where
        text = tuple(self.scheduler.requests[request_id].all_token_ids[: plan.logical_start])
        earlier = [
            self.heads[layer, head, other]
            for other, computed in self.texts.items()
            if computed == text and other != request_id
        ]
        alike = [h for h in earlier if h.capacity == plan.capacity]
        self.num_turns += 1
        turn = deepcopy(replace(alike[-1], rotate_back=None))
        turn.begin_turn()
        return turn


def own_text(seed: int, length: int) -> list[int]:
    """Tokens that nobody else says."""
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


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
