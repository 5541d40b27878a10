# SPDX-License-Identifier: Apache-2.0
"""Conversations: which entry a request continues from, and when there is none."""

from __future__ import annotations

import itertools

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from tests.scheduler.conversations import (
    ON,
    TENANTS,
    Talking,
    Tenant,
    entries_of,
    first_turn,
    talk,
)
from tests.scheduler.harness import BLOCK_SIZE, vllm_config
from tests.scheduler.schedules import PREFIXES, SNAPKV


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("tenant", TENANTS)
def test_the_next_turn_begins_where_the_last_one_ended(depth: int, tenant: Tenant) -> None:
    """Also of several at once, again and again, and one that has less to say."""
    talking = talk(depth)
    text = first_turn(talking, tenant)
    for more, num in ((1, 1), (3, 3), (0, 2), (9, 1)):
        before = talking.count["continue"]
        for _ in range(num):
            talking.say([*text, *range(100, 100 + more)], 2, tenant)
        talking.drain()
        assert talking.count["continue"] == before + num
    talking.scheduler.check_integrity()


@pytest.mark.parametrize("other", TENANTS[1:])
def test_no_request_continues_from_another_tenant(other: Tenant) -> None:
    """Another salt, adapter or budget, either way round."""
    for one, two in ((TENANTS[0], other), (other, TENANTS[0])):
        talking = talk()
        text = first_turn(talking, one)
        talking.say([*text, 100], 2, two)
        talking.say(text[:-2], 2, one)  # it ends before what was computed does
        talking.say([*text[:20], 5, *text[21:], 5], 2, one)
        talking.drain()
        assert talking.count["continue"] == 0


def test_the_longest_wins_and_a_taken_page_is_gone() -> None:
    """A branch continues where it left; an entry ends when one of its pages is taken."""
    talking = talk()
    text = first_turn(talking)
    longer = [*text, 100, 101]
    talking.say(longer, 3, TENANTS[0])
    talking.drain()
    second = talking.said[-1][1]
    for prompt, begun in (([*second, 1], len(second) - 1), ([*text, 1, 2], len(text) - 1)):
        request_id = talking.say(prompt, 1, TENANTS[0])
        output = talking.step()
        assert output.residency_plan.requests[request_id].logical_start == begun
        talking.drain()
    entries = entries_of(talking)
    request = _request_of(talking, [*text, 1, 2, 3])
    entries.weights.begin(request)
    entry = entries.find(request, talking.scheduler.ledger.budget)
    assert entry is not None and entry.turn.logical_len == len(text) + 2
    pool = talking.scheduler.block_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    pool.free_blocks(taken)
    assert entries.find(request, talking.scheduler.ledger.budget) is None


def _request_of(talking: Talking, prompt: list[int]) -> Request:
    request_id = talking.say(prompt, 1, TENANTS[0])
    request = talking.scheduler.requests[request_id]
    talking.abort([request_id])
    return request


def with_host(num_host_slots: int, num_blocks: int = 13) -> Talking:
    """A pool that holds one request at a time, and host memory."""
    talking = Talking(vllm_config(12, 64, 8, "fcfs", False, (ON,)), num_blocks, 1)
    entries_of(talking).host.num_pages = num_host_slots // BLOCK_SIZE
    return talking


def test_entry_whose_page_is_taken_goes_on_from_host_memory() -> None:
    """What was used least recently is gone; the pool shadows each token."""
    talking = with_host(24)
    texts = [first_turn(talking, tenant) for tenant in TENANTS[:3]]
    talking.say(range(200, 240), 2, TENANTS[0])  # it takes the pages of the third
    talking.drain()
    assert (talking.count["save"], talking.count["drop"]) == (3, 1)
    for index, fetched in ((2, 1), (1, 2), (0, 2)):
        talking.say([*texts[index], 1], 1, TENANTS[index])
        talking.drain()
        assert talking.count["fetch"] == fetched
    talking.scheduler.check_integrity()
    stats = talking.scheduler.stats_reporter.report()
    assert stats.continuation_host_hits == stats.continuation_hits == sum(map(len, texts[1:])) - 2
    counted = (stats.continuation_host_saves, stats.continuation_host_drops)
    assert counted == (talking.count["save"], talking.count["drop"])
    held = sum(map(len, talking.pool.host.values()))  # of 32 + 32 floats, and eight bytes more
    assert stats.continuation_host_bytes == held * 264 > 0
    assert talking.scheduler.stats_reporter.report().continuation_host_saves == 0


@pytest.mark.parametrize("how", ["reset", "weights"])
def test_host_memory_is_emptied_with_the_pool(how: str) -> None:
    """By a reset, and by new weights; workers drop what they hold with the next step."""
    talking = with_host(100)
    text = first_turn(talking)
    talking.say(range(200, 240), 2, TENANTS[0])
    talking.drain()
    assert talking.pool.host
    if how == "reset":
        assert talking.scheduler.reset_prefix_cache()
    else:
        entries_of(talking).weights.call("reload_weights")
    talking.say([*text, 1], 2, TENANTS[0])
    talking.step()
    assert talking.pool.host == {}
    talking.drain()
    assert talking.count["fetch"] == talking.count["continue"] == 0


@pytest.mark.parametrize("num_host_slots", [0, 48])
@pytest.mark.parametrize("num_asked", [1, 2])
def test_what_is_asked_again_stays_longer(num_asked: int, num_host_slots: int) -> None:
    """A document that several requests ask about; of a turn the next one leaves an entry."""
    talking = with_host(num_host_slots, num_blocks=13 if num_host_slots else 30)
    texts = [first_turn(talking, tenant) for tenant in TENANTS[:2]]
    for word in range(num_asked):
        talking.say([*texts[0], word], 1, TENANTS[0])
        talking.drain()
    kept, words = [True, True], itertools.count()
    while all(kept):
        first = 300 + next(words)
        talking.say(range(first, first + 30), 1, TENANTS[2])
        talking.drain()
        kept = [_finds(talking, text, TENANTS[i]) for i, text in enumerate(texts)]
    assert kept == [num_asked > 1, num_asked == 1]


def _finds(talking: Talking, text: list[int], tenant: Tenant) -> bool:
    """Whether a request that asks more continues from all but the last token of a text."""
    request_id = talking.say([*text, 99], 1, tenant)
    request, entries = talking.scheduler.requests[request_id], entries_of(talking)
    talking.abort([request_id])
    entries.weights.begin(request)
    entry = entries.find(request, talking.scheduler.ledger.budget)
    return entry is not None and entry.turn.logical_len == len(text) - 1


@pytest.mark.parametrize(("num_new", "continues"), [(3, True), (4, False)])
def test_turn_after_shared_slots_is_much_shorter(num_new: int, continues: bool) -> None:
    """At most a sixteenth of what it finds: its tokens come one a step, those of others do not."""
    for split, expected in (("none", True), ("heads", continues)):
        talking = talk(split=split)
        talking.say(range(10, 57), 2, TENANTS[0])
        talking.drain()
        text = talking.said[-1][1]
        assert len(text) - 1 == 48
        request_id = talking.say([*text, *range(100, 100 + num_new - 1)], 4, TENANTS[0])
        output = talking.step()
        found = output.residency_plan.requests[request_id].logical_start
        assert found == (48 if expected else 0)
        rest = len(text) + num_new - 1 - found
        one_by_one = split == "heads" and expected
        assert output.num_scheduled_tokens[request_id] == (1 if one_by_one else rest)
        talking.drain()
        talking.scheduler.check_integrity()


def test_turn_that_takes_a_token_a_step_is_not_put_off() -> None:
    """Data parallelism puts prompts off while others decode; this one would wait at each token."""
    talking = talk(split="heads")
    talking.say(range(10, 57), 2, TENANTS[0])
    talking.drain()
    text = talking.said[-1][1]
    talking.say(range(200, 220), 40, TENANTS[0])
    talking.step()
    request_id = talking.say([*text, 100, 101], 4, TENANTS[0])
    talking.step()
    own = talking.scheduler.schedule
    talking.scheduler.schedule = lambda: own(throttle_prefills=True)  # type: ignore[method-assign]
    for _ in range(3):
        assert talking.step().num_scheduled_tokens[request_id] == 1


def test_prefix_in_the_cache_is_better_than_many_steps() -> None:
    """An entry saves a few tokens more than the prefix cache, and the others a step each."""
    talking = talk(num_blocks=200, prefix_caching=True, split="heads", **dict(SNAPKV))
    text = [*range(10, 58), 7, 8]
    talking.say(text[:48], 2, TENANTS[0])
    talking.drain()
    text = talking.said[-1][1]
    request_id = talking.say([*text, 100], 4, TENANTS[0])
    output = talking.step()
    assert output.residency_plan.continued == {}
    assert 0 < output.residency_plan.requests[request_id].logical_start < 48
    talking.drain()


def test_a_reset_ends_them_all() -> None:
    """VLLM resets its cache when weights change, or when it sleeps."""
    talking = talk()
    text = first_turn(talking)
    assert talking.scheduler.reset_prefix_cache()
    talking.say([*text, 1], 2, TENANTS[0])
    talking.drain()
    assert talking.count["continue"] == 0


def test_what_is_seen() -> None:
    """Tokens that were asked for, and those that were there."""
    talking = talk()
    text = first_turn(talking)
    talking.say([*text, 1], 2, TENANTS[0])
    talking.drain()
    stats = talking.scheduler.stats_reporter.report()
    assert stats.continuation_queries == 30 + len(text) + 1
    assert stats.continuation_hits == len(text) - 1
    assert talking.scheduler.stats_reporter.report().continuation_queries == 0


def test_requests_with_a_raw_hit_are_counted() -> None:
    """They ask for all their tokens, and continue from none."""
    talking = talk(name="streaming", num_sink_tokens=2, prefix_caching=True)
    for _ in range(2):
        talking.say(range(10, 42), 1, TENANTS[0])
        talking.drain()
    assert talking.count["hit"] == 1
    stats = talking.scheduler.stats_reporter.report()
    assert (stats.continuation_queries, stats.continuation_hits) == (64, 0)


@pytest.mark.parametrize("method", ["reload_weights", "update_weights", print])
@pytest.mark.parametrize("tenant", TENANTS[:3])
def test_entries_where_weights_change_are_gone(method: object, tenant: Tenant) -> None:
    """Also those of an adapter, and of a request that ran meanwhile; the next turn leaves one."""
    talking = talk()
    text = first_turn(talking, tenant)
    talking.say(range(50, 80), 6, tenant)
    talking.step()
    entries_of(talking).weights.call(method)
    talking.drain()
    meanwhile = talking.said[-1][1]
    for said in (text, meanwhile):
        talking.say([*said, 1], 2, tenant)
    talking.drain()
    assert talking.count["continue"] == 0
    talking.say([*talking.said[-1][1], 1], 2, tenant)
    talking.drain()
    assert talking.count["continue"] == 1
    talking.scheduler.check_integrity()


def test_entries_where_workers_are_only_read_stay() -> None:
    """A method that is known to leave weights alone."""
    talking = talk()
    text = first_turn(talking)
    entries_of(talking).weights.call("compute_weight_checksums")
    talking.say([*text, 1], 2, TENANTS[0])
    talking.drain()
    assert talking.count["continue"] == 1


def test_entries_of_a_preempted_request_are_of_the_newer_weights() -> None:
    """It is computed again from its first token, so the next turn goes on from it."""
    talking = talk()
    talking.say(range(10, 40), 6, TENANTS[0])
    talking.step()
    entries_of(talking).weights.call("reload_weights")
    assert talking.scheduler.reset_prefix_cache(reset_running_requests=True)
    talking.drain()
    talking.say([*talking.said[-1][1], 1], 2, TENANTS[0])
    talking.drain()
    assert talking.count["continue"] == 1


@pytest.mark.parametrize("tenant", [TENANTS[0], TENANTS[2]])
def test_prefixes_where_weights_change_are_gone(tenant: Tenant) -> None:
    """VLLM's hashes do not name them; a request that runs meanwhile publishes no more blocks."""
    options = (ON, PREFIXES, ("name", "streaming"), ("num_sink_tokens", 2))
    talking = Talking(vllm_config(12, 16, 8, "fcfs", False, options), 200, 1)
    first_turn(talking, tenant)
    talking.say(range(10, 70), 2, tenant)
    talking.step()
    weights, pool = entries_of(talking).weights, talking.scheduler.block_manager.block_pool
    assert talking.count["hit"] == 1
    if tenant.adapter:
        weights.load(LoRARequest(tenant.adapter, 1, "/nowhere", load_inplace=True))
    else:
        weights.call("reload_weights")
    assert talking.scheduler.running
    talking.drain()
    assert {block.block_hash for block in pool.blocks} == {None}
    talking.say(range(10, 70), 2, tenant)
    talking.drain()
    assert talking.count["hit"] == 1
    talking.scheduler.check_integrity()


def test_entries_of_other_adapters_stay() -> None:
    """Where one is loaded again in place; those of the model without any stay, too."""
    talking = talk()
    texts = [first_turn(talking, tenant) for tenant in TENANTS[:3]]
    weights = entries_of(talking).weights
    weights.load(LoRARequest("b", 1, "/nowhere"))  # its workers keep it
    weights.load(LoRARequest("c", 2, "/nowhere", load_inplace=True))
    weights.load(LoRARequest("c", 2, "/nowhere", load_inplace=True))
    for text, tenant in zip(texts, TENANTS, strict=False):
        talking.say([*text, 1], 2, tenant)
    talking.drain()
    assert talking.count["continue"] == 3
    weights.load(LoRARequest("b", 1, "/nowhere", load_inplace=True))
    for text, tenant in zip(texts, TENANTS, strict=False):
        talking.say([*text, 1], 2, tenant)
    talking.drain()
    assert talking.count["continue"] == 5
