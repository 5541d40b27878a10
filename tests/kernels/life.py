# SPDX-License-Identifier: Apache-2.0
"""The sizes of a layer under test, and the requests that it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from vllm_h2o.policy import Budget
from vllm_h2o.policy.eviction import At
from vllm_h2o.scheduler.ledger import Ledger
from vllm_h2o.scheduler.rules import Rules
from vllm_h2o.scheduler.state import RequestInfo
from vllm_h2o.wire import RequestPlan


@dataclass(frozen=True)
class Shape:
    """Sizes of the layer."""

    num_kv_heads: int = 2
    group: int = 1
    head_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    float8: torch.dtype | None = None  # of the cache, with the scales of K and V
    scales: tuple[float, float] = (1.0, 1.0)
    has_sinks: bool = False  # of attention, one for each query head
    num_layers: int = 1  # that share slots, each with num_kv_heads

    @property
    def num_heads_of_all(self) -> int:
        """KV heads of all layers."""
        return self.num_layers * self.num_kv_heads

    def heads(self, layer: int) -> slice:
        """One layer's part of the KV heads of all layers."""
        return slice(layer * self.num_kv_heads, (layer + 1) * self.num_kv_heads)

    @property
    def stored(self) -> torch.dtype:
        """The cache's."""
        return self.float8 or self.dtype

    @property
    def scale(self) -> float:
        """Factor of the logits."""
        return self.head_size**-0.5


@dataclass
class Life:
    """One request: its prompt in chunks, then one token a step.

    Args:
        request_id: its name; inputs follow from it and the shape alone.
        budget: slots.
        chunks: tokens of each chunk of the prompt; the last one has the observation window.
        num_decodes: tokens after the prompt.
        seed: of its inputs.
        sharpness: factor of the queries: how unequal probabilities are.
        at: when the prompt is evicted from; with ``pressure``, memory is short at each prompt's
            end that has an odd number of tokens, and at every seventh token after it.
        splits: whether KV heads share slots.

    """

    request_id: str
    budget: Budget
    chunks: Sequence[int]
    num_decodes: int
    seed: int = 0
    sharpness: float = 2.0
    at: At = "prompt_end"
    splits: bool = False
    num_computed: int = 0
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = field(init=False, repr=False)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return sum(self.chunks)

    @property
    def num_left(self) -> int:
        """Tokens that are still to be computed."""
        return self.prompt_len + self.num_decodes - self.num_computed

    @property
    def max_slots(self) -> int:
        """The most that it ever holds."""
        grown = self.num_decodes if self.at == "pressure" else 0
        return max(self.prompt_len + grown, self.budget.capacity)

    def prepare(self, shape: Shape, lifetime: int = 0) -> None:
        """Draw q [n, Hq, D], k and v [n, H, D] for its n tokens, of the heads of all layers.

        Args:
            shape: of the layer.
            lifetime: of the ranking's last term.

        """
        draw = torch.Generator().manual_seed(sum(self.request_id.encode()) * 1009 + self.seed)
        num_kv_heads = shape.num_heads_of_all
        heads = (num_kv_heads * shape.group, num_kv_heads, num_kv_heads)
        sizes = [(self.num_left, num, shape.head_size) for num in heads]
        query, key, value = (torch.randn(size, generator=draw).to(shape.dtype) for size in sizes)
        # Where heads share slots, they are unlike each other.
        each = torch.linspace(0.2, 2.0, num_kv_heads) if self.splits else torch.ones(1)
        each = each.repeat_interleave(shape.group) if self.splits else each
        self.inputs = ((query * self.sharpness * each[:, None]).to(shape.dtype), key, value)
        rules = Rules(at=self.at, lifetime=lifetime, splits=self.splits)
        self.ledger = Ledger(self.budget, shape.block_size, rules)

    def tokens(self, plan: RequestPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v of the plan's tokens."""
        query, key, value = (t[plan.logical_start : plan.logical_end] for t in self.inputs)
        return query, key, value

    def next_plan(self) -> RequestPlan:
        """Plan and commit the next chunk, or the next token."""
        bounds = [sum(self.chunks[:i]) for i in range(len(self.chunks) + 1)]
        later = [bound for bound in bounds if bound > self.num_computed]
        end = later[0] if later else self.num_computed + 1
        info = RequestInfo(self.prompt_len)
        if self.at == "pressure":
            self.ledger.is_short = end % 2 > 0
            self.ledger.falling_back = {self.request_id} if end % 7 == 0 and not later else set()
        plan = self.ledger.preview(self.request_id, self.num_computed, end, info)
        self.ledger.commit(self.request_id, plan, info)
        self.num_computed = end
        return self.ledger.take_step({self.request_id: plan.num_new}).requests[self.request_id]
