# SPDX-License-Identifier: Apache-2.0
"""Random conversations: the owner of a token follows from texts, not from plans."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from tests.scheduler.harness import MAX_MODEL_LEN, STOP, Simulation, vllm_config
from tests.scheduler.shadow import ShadowPool
from vllm_h2o import files
from vllm_h2o.kernels.held import Held
from vllm_h2o.scheduler.conversations import Conversations
from vllm_h2o.wire import Continuation, RequestPlan
from vllm_h2o.worker.files import read, write


class Tenant(NamedTuple):
    """With whom a request shares nothing that differs in one of these."""

    salt: str | None = None
    adapter: str | None = None
    budget: int | None = None


TENANTS = (Tenant(), Tenant(salt="a"), Tenant(adapter="b"), Tenant(budget=40))


def place_of(names: tuple[str, ...]) -> str:
    """The place of files that a step reads, of which some may be gone by now."""
    path = Path(os.readlink(names[0]))
    return str(path.parent / path.name.split(".")[0])


class ConversationPool(ShadowPool):
    """Names a token by its tenant, all tokens up to it, and where turns before it were packed.

    ``start`` is called before a step that was scheduled reads anything.
    """

    start: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tenants: dict[str, Tenant] = {}
        self.texts: dict[str, list[int]] = {}
        self.packed: dict[str, tuple[int, ...]] = {}
        self.requests: dict[str, Request] = {}
        self.host: dict[int | str, list[Any]] = {}  # and files
        self.chosen: dict[int, int] = {}  # victims of full requests, by first block
        self.chosen_on_host: dict[int | str, int] = {}
        self.left: set[int | str] = set()  # places of files that no answer has waited for
        self.num_returned = 0

    def _token(self, request_id: str, position: int) -> tuple[object, int]:
        text = tuple(self.texts[request_id][: position + 1])
        assert len(text) == position + 1
        packed = tuple(end for end in self.packed[request_id] if end <= position)
        tenant = self.tenants[request_id]
        # What nothing was evicted before is the same whatever the budget.
        return (tenant if packed else tenant._replace(budget=None), text, packed), position

    def execute(self, output: SchedulerOutput) -> None:
        """Begin the lives of this step, copy what they continue from, and run the plans."""
        self.start()
        cached = output.scheduled_cached_reqs
        begun = [new.req_id for new in output.scheduled_new_reqs]
        for request_id in [*begun, *cached.resumed_req_ids]:
            self.texts[request_id] = list(self.requests[request_id].all_token_ids)
            self.packed[request_id] = (len(self.texts[request_id]),)
        plan = output.residency_plan
        own = len(self.others)
        rows = {new.req_id: new.block_ids[own] for new in output.scheduled_new_reqs}
        granted = (ids and ids[own] for ids in cached.new_block_ids)
        rows |= dict(zip(cached.req_ids, granted, strict=True))
        for saved in plan.saved:
            if isinstance(saved.place, int):
                assert saved.place not in self.host
            elif any(map(files.check, files.of_worker(saved.place, 0, 1))):
                continue
            else:
                write(saved.place, 0, 1, [Held({"score": torch.zeros(1)})], saved.header)
            self.left |= set() if saved.is_awaited else {saved.place}
            if isinstance(saved.source, int):
                self.host[saved.place] = self.host[saved.source]
                self.chosen_on_host[saved.place] = self.chosen_on_host[saved.source]
            else:
                self.host[saved.place] = self._in_pages(saved.source)
                self.chosen_on_host[saved.place] = self.chosen.get(saved.source[0], -1)
        read = {i: self._left(c, plan.requests[i]) for i, c in plan.continued.items()}
        states = {i: self._states(each) for i, each in plan.continued.items()}
        chosen = {i: self._chosen(each) for i, each in plan.continued.items() if each.keeps_slots}
        self.victims |= chosen
        for number in plan.dropped:
            del self.host[number], self.chosen_on_host[number]
        for request_id, tokens in read.items():
            each = plan.continued[request_id]
            num_blocks = len(each.blocks) - own
            assert list(each.blocks[:num_blocks]) == rows[request_id][:num_blocks]
            for index, state in enumerate(states[request_id]):
                block = each.blocks[num_blocks + index // self.block_size]
                self.slots[block, index % self.block_size] = state
            for index, token in enumerate(tokens):
                block = each.blocks[index // self.block_size]
                self.slots[block, index % self.block_size] = token
            (_, _, packed), last = max(tokens, key=lambda token: token[1])
            assert last == plan.requests[request_id].logical_start - 1
            # What keeps its slots goes on as if one request had generated it.
            ends = () if each.keeps_slots else self.packed[request_id]
            self.packed[request_id] = (*packed, *ends)
            positions = {position for _, position in tokens}
            life = self.lives[request_id] + 1
            self.held[request_id] = (life, positions)
            self.positions[request_id, life] = {p: p for p in positions}
        super().execute(output)
        for request_id, each_plan in plan.requests.items():
            if each_plan.selects:
                first = self.tables[request_id][each_plan.first_block_idx]
                self.chosen[first] = self.victims[request_id]

    def _chosen(self, each: Continuation) -> int:
        """The slot of the earlier request's next token; -1: it was not full."""
        if each.place is not None:
            place = place_of(each.place) if isinstance(each.place, tuple) else each.place
            return self.chosen_on_host[place]
        return self.chosen.get(each.source[0], -1)

    def _contents(self, each: Continuation) -> list[Any]:
        """What slots hold before this step, or host memory, or a file that can be read."""
        if each.place is None:
            return self._in_pages(each.source)
        if isinstance(each.place, int):
            return self.host[each.place]
        (name,) = each.place
        read(name)
        return self.host[place_of(each.place)]

    def _states(self, each: Continuation) -> list[Any]:
        """What the slots of all states hold: they are the last ones."""
        contents = self._contents(each)
        return contents[len(contents) - len(self.others) * self.block_size :]

    def _left(self, each: Continuation, plan: RequestPlan) -> list[Any]:
        """The tokens that a request begins with."""
        tokens = self._contents(each)[: each.num_slots]
        if isinstance(each.place, tuple):
            self.num_returned += place_of(each.place) in self.left
        if plan.is_split:  # a slot may be free
            assert 0 <= len(tokens) - plan.resident_start <= 1
        else:
            assert len(tokens) == plan.resident_start
        tokens = tokens[: plan.resident_start]
        return tokens if each.keeps_slots else sorted(tokens, key=lambda token: token[1])

    def _in_pages(self, blocks: Sequence[int]) -> list[Any]:
        """What slots hold before this step."""
        return [self.slots.get((block, i)) for block in blocks for i in range(self.block_size)]


class Talking(Simulation):
    """A simulation whose requests go on from what others have said."""

    num_host_slots = 0
    """Slots of entries in host memory, which an option counts in GiB."""
    asks_to_save = False
    """Whether every other request asks to be kept in files."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        block_size = self.scheduler.block_manager.block_size
        entries_of(self).host.num_pages = self.num_host_slots // block_size
        draws, others = self.pool.random, self.pool.others
        self.pool = ConversationPool(0, block_size)
        self.pool.random, self.pool.others = draws, others
        self.pool.requests = self.scheduler.requests
        self.said: list[tuple[Tenant, list[int]]] = []
        self.all: dict[str, Request] = {}

    def say(self, prompt: Sequence[int], max_tokens: int, tenant: Tenant, priority: int = 0) -> str:
        """A new request."""
        request_id = f"r{self.count['add']}"
        self.count["add"] += 1
        extra = {} if tenant.budget is None else {"kv_budget": tenant.budget}
        if self.asks_to_save and self.count["add"] % 2 and not tenant.adapter:
            extra["kv_save"] = 1
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, stop_token_ids=[STOP], extra_args=extra
        )
        adapter = tenant.adapter and LoRARequest(tenant.adapter, 1, "/nowhere")
        request = self.all[request_id] = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            priority=priority,
            lora_request=adapter,
            cache_salt=tenant.salt,
            block_hasher=self.hasher,
        )
        self.pool.tenants[request_id] = tenant
        self.scheduler.add_request(request)
        return request_id

    def step(self) -> SchedulerOutput:
        """One step, and what has been said when requests end in it."""
        output = super().step()
        plan = output.residency_plan
        self.count["continue"] += len(plan.continued)
        for saved in plan.saved:
            kind = "write" if saved.is_awaited else "leave"
            self.count["save" if isinstance(saved.place, int) else kind] += 1
        self.count["drop"] += len(plan.dropped)
        self.count["share"] += sum(plan.requests[i].is_split for i in plan.continued)
        kept = (i for i, turn in plan.continued.items() if turn.keeps_slots)
        self.count["proceed"] += sum(not plan.requests[i].is_split for i in kept)
        self.count["fetch"] += sum(isinstance(t.place, int) for t in plan.continued.values())
        self.count["read"] += sum(isinstance(t.place, tuple) for t in plan.continued.values())
        self.remember()
        return output

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests; what they said is said."""
        super().abort(request_ids)
        self.remember()

    def remember(self) -> None:
        """Let others go on from requests that have ended."""
        for request_id in [i for i in self.all if i not in self.scheduler.requests]:
            request = self.all.pop(request_id)
            self.said.append((self.pool.tenants[request_id], list(request.all_token_ids)))

    def _sample(self, output: SchedulerOutput) -> ModelRunnerOutput:
        sampled = super()._sample(output)
        for request_id, tokens in zip(sampled.req_ids, sampled.sampled_token_ids, strict=True):
            self.pool.texts[request_id] += tokens
        return sampled

    def _token(self) -> int:
        return STOP if self.random.random() < self.stop_rate else self.random.choice((7, 8))

    def run(self, ops: Sequence[tuple]) -> None:
        """Do what a random schedule says, then all that is left.

        Args:
            ops: those of a simulation, where forks are tenants, and ("go on", from whom, tokens
                less, tokens more, most tokens, requests, tenant or None: the same).

        """
        for op in ops:
            if op[0] == "add":
                prompt = [10 + i for i in range(min(op[1], 24))]
                for _ in range(op[3]):
                    self.say(prompt, op[2], TENANTS[(op[4] or 0) % len(TENANTS)])
            elif op[0] == "go on":
                self.go_on(*op[1:])
            else:
                self.run_one(op)
        self.drain()

    def go_on(
        self, whom: int, less: int, more: int, most: int, num: int, tenant: int | None
    ) -> None:
        """Add the next turn of a text, perhaps without its last tokens or as another tenant."""
        if not self.said:
            return
        own, text = self.said[-1 - whom % len(self.said)]
        prompt = [*text[: max(len(text) - less, 1)], *range(100, 100 + more)]
        prompt = prompt[: MAX_MODEL_LEN - 4]
        for _ in range(num):
            most = min(most, MAX_MODEL_LEN - len(prompt))
            self.say(prompt, most, own if tenant is None else TENANTS[tenant])


class WithHost(Talking):
    """Entries whose pages are taken go to host memory, which holds a few."""

    num_host_slots = 60

    def step(self) -> SchedulerOutput:
        """One step, after which host memory holds what the scheduler counts, or will once told."""
        output = super().step()
        entries = entries_of(self)
        untold, untaken = entries.host._saved.keys(), set(entries.host._dropped)
        assert self.pool.host.keys() | untold == entries._on_host.keys() | untaken
        assert sum(map(len, self.pool.host.values())) <= self.num_host_slots
        return output


ON = ("continuation", True)


def talk(depth: int = 1, num_blocks: int = 200, **options: object) -> Talking:
    """Conversations in a pool that holds them all, unless told otherwise."""
    own = (ON, *options.items())
    config = vllm_config(12, 64, 8, "fcfs", async_scheduling=depth > 1, options=own)
    return Talking(config, num_blocks, depth)


def entries_of(talking: Talking) -> Conversations:
    """The book of entries."""
    entries = talking.scheduler.conversations
    assert entries is not None
    return entries


def first_turn(talking: Talking, tenant: Tenant = TENANTS[0]) -> list[int]:
    """Said, with 30 tokens of prompt and 6 more."""
    talking.say(range(10, 40), 6, tenant)
    talking.drain()
    return talking.said[-1][1]
