# SPDX-License-Identifier: Apache-2.0
"""One request worked by hand, for docs/design.md: the real scheduler, block manager and reference.

Each token has a *weight*, and each query pays every token that it sees its weight over the sum of
all weights that it sees: attention that can be added up on paper. It is real attention, over heads
of size 1: the key of a token is the logarithm of its weight, and every query is 1.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from tests.scheduler.harness import make_scheduler
from tests.tiny_models import engine_config, folder
from vllm_h2o.kernels.reference import Head
from vllm_h2o.kernels.strip import Strip
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.scheduler.scheduler import HeavyHitterScheduler
from vllm_h2o.wire import Plans, RequestPlan

WEIGHTS = (4, 1, 1, 2, 8, 1, 1, 6, 1, 5, 2, 1, 4, 1, 3, 2)
"""Weights of the tokens at positions 0 to 15."""
PROMPT_LEN, NUM_BLOCKS = 11, 17


@dataclass(frozen=True)
class Case:
    """An engine and its requests.

    Args:
        options: of the policy, beyond 8 slots.
        block_size: slots of a page.
        num_same: first tokens that all prompts have in common.
        num_requests: one after the other.
        num_more: tokens that each computes after its prompt.

    """

    options: dict[str, object]
    block_size: int = 4
    num_same: int = PROMPT_LEN
    num_requests: int = 1
    num_more: int = 5


CASES = {
    "token": Case({}),
    "page": Case({"evict_every": "page", "recent_ratio": 0.25}, block_size=2),
    "prefix": Case({"name": "snapkv", "observation_window": 3}, 4, 8, 2, num_more=2),
}


@dataclass(frozen=True)
class Moment:
    """One request at one point of one step.

    Args:
        request_id: the request.
        plan: of the step.
        packed: whether this is after survivors were packed.
        row: of the block table; None where a page has been dropped.
        num_free: free pages of the pool.
        positions: of the tokens in its slots.
        scores: of the tokens.
        victim: the slot that the next token takes; None where a slot is free.

    """

    request_id: str
    plan: RequestPlan
    packed: bool
    row: tuple[int | None, ...]
    num_free: int
    positions: tuple[int, ...]
    scores: tuple[float, ...]
    victim: int | None


class Engine:
    """The plugin's scheduler over a small pool, and a head of the reference for each request."""

    def __init__(self, case: Case, models: Path) -> None:
        self.case = case
        config = engine_config(
            folder(models, "LlamaForCausalLM"),
            block_size=case.block_size,
            max_model_len=64,
            max_num_batched_tokens=64,
            max_num_seqs=8,
            enable_prefix_caching=case.num_requests > 1,
            additional_config={"kv_policy": {"name": "h2o", "budget": 8, **case.options}},
        )
        self.config = KVPolicyConfig.required(config)
        self.scheduler: HeavyHitterScheduler = make_scheduler(config, NUM_BLOCKS, case.block_size)
        self.hasher = None
        if case.num_requests > 1:
            init_none_hash(sha256)
            self.hasher = get_request_block_hasher(case.block_size, sha256)

    def moments(self) -> Iterator[Moment]:
        """All requests, one after the other."""
        for number in range(self.case.num_requests):
            yield from self._request(number)

    def _request(self, number: int) -> Iterator[Moment]:
        request_id = "AB"[number]
        same = list(range(self.case.num_same))
        own = [100 * (number + 1) + i for i in range(PROMPT_LEN - len(same))]
        params = SamplingParams(max_tokens=self.case.num_more + 1, ignore_eos=True)
        request = Request(request_id, same + own, params, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        head: Head | None = None
        told = Plans()
        for _ in range(1 + self.case.num_more):
            output = self.scheduler.schedule()
            self.scheduler.check_integrity()
            # The next step changes the plan, and moments are read later.
            plan = copy.copy(told.complete(output.residency_plan).requests[request_id])
            head = head or self._head(plan)
            yield from self._run(request_id, plan, head)
            sampled = ModelRunnerOutput([request_id], {request_id: 0}, [[7]])
            self.scheduler.update_from_output(output, sampled)

    def _head(self, plan: RequestPlan) -> Head:
        """A head with the tokens that the request found in the prefix cache; their scores are 0."""
        found = range(plan.logical_start)
        key = _keys(found)
        positions = torch.tensor(found, dtype=torch.int64)
        strip = Strip(key, key, torch.zeros(len(found), dtype=torch.float64), positions)
        return Head(strip, plan.budget, self.config.ranking, logical_len=plan.logical_start)

    def _run(self, request_id: str, plan: RequestPlan, head: Head) -> Iterator[Moment]:
        """The step, before survivors are packed, if any are, and at its end."""
        key = _keys(range(plan.logical_start, plan.logical_end))
        query = torch.ones(plan.num_new, 1, 1, dtype=torch.float64)
        window = query[-self.config.num_window_queries :]
        terms = [(term, window) for term in self.config.ranking.passes if plan.in_prompt]
        step = (query, key, key, plan.in_prompt, terms)
        if plan.num_survivors:
            whole = replace(copy.deepcopy(head), grows=True)
            whole.step(*step)
            yield self._moment(request_id, plan, whole, packed=False)
        head.step(*step)
        yield self._moment(request_id, plan, head, packed=plan.num_survivors > 0)

    def _moment(self, request_id: str, plan: RequestPlan, head: Head, packed: bool) -> Moment:
        manager = self.scheduler.block_manager
        pool, null = manager.block_pool, manager.block_pool.null_block
        blocks = manager.req_to_blocks[request_id]
        return Moment(
            request_id,
            plan,
            packed,
            tuple(None if block is null else block.block_id for block in blocks),
            pool.get_num_free_blocks(),
            tuple(head.strip.position.tolist()),
            tuple(head.strip.score.tolist()),
            head.victim,
        )


def _keys(positions: Sequence[int]) -> torch.Tensor:
    """[T, 1]: logarithms of the weights."""
    logs = [math.log(WEIGHTS[position]) for position in positions]
    return torch.tensor(logs, dtype=torch.float64)[:, None]


@cache
def moments(name: str) -> tuple[Moment, ...]:
    """The moments of one of the cases."""
    with tempfile.TemporaryDirectory(prefix="vllm-h2o-docs-") as models:
        return tuple(Engine(CASES[name], Path(models)).moments())


def weights_table() -> str:
    """The weights, as a table in Markdown."""
    rows = [["token", *map(str, range(len(WEIGHTS)))], ["weight", *map(str, WEIGHTS)]]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + " ---: |" * len(rows[0]), lines[1]]) + "\n"


def example(name: str) -> str:
    """One of the cases, drawn step by step."""
    case, lines, step = CASES[name], ["```"], 0
    for moment in moments(name):
        if moment.plan.in_prompt and not moment.packed:
            step = 0
        step += not moment.packed
        lines += [*([""] if len(lines) > 1 else []), *_drawn(moment, case, step)]
    return "\n".join([*lines, "```"]) + "\n"


def _drawn(moment: Moment, case: Case, step: int) -> list[str]:
    """A line about the step, then pages, tokens and scores, one above the other."""
    plan, size = moment.plan, case.block_size
    who = f"{moment.request_id}, " if case.num_requests > 1 else ""
    new = f"tokens {plan.logical_start} to {plan.logical_end - 1}, of the prompt"
    what = new if plan.in_prompt else f"token {plan.logical_start}"
    row = " ".join("-" if page is None else str(page) for page in moment.row)
    title = f"{who}step {step}: {what}; row {row}; {moment.num_free} pages free"
    start = plan.pack_block_idx if moment.packed else plan.first_block_idx
    pages = moment.row[start : start + math.ceil(len(moment.positions) / size)]
    if moment.packed:
        title = f"{who}step {step}, at its end: {plan.num_survivors} survivors are packed"
    width = 5 * size
    unused = len(pages) * size - len(moment.positions)
    positions = [*map(str, moment.positions), *["."] * unused]
    scores = [f"{score:.2f}" for score in moment.scores] + ["."] * unused

    def cells(values: Sequence[str]) -> str:
        parts = [values[i : i + size] for i in range(0, len(values), size)]
        return " |".join("".join(f"{value:>5}" for value in part) for part in parts)

    head = " |".join(f"   {f'page {page}':<{width - 3}}" for page in pages).rstrip()
    lines = [title, f"  page  {head}", f"  token {cells(positions)}", f"  score {cells(scores)}"]
    if moment.packed or not plan.num_survivors:
        lines.append(f"  next  {_next(moment)}")
    return lines


def _next(moment: Moment) -> str:
    """The slot of the next token."""
    if moment.victim is None:
        return f"slot {len(moment.positions)}, free"
    return f"slot {moment.victim}, over token {moment.positions[moment.victim]}"
